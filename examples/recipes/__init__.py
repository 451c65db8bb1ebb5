"""Small programs for common uses of jobs, each a file that runs; docs/recipes.md tells their stories."""
