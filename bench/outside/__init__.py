"""The outside harness: chaos and bloat cells of another project's benchmark, for us and peers."""
