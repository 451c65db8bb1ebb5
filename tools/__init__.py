"""Programs for those who work on Headrace itself."""
