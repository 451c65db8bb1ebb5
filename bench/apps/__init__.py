"""The applications that our workers run while measured; `penstock` loads them as a user's."""
