"""Examples of the Python reference (docs/reference/python); the tests run each file's `main`."""
