"""The applications that our workers run while measured; `headrace` loads them as a user's."""
