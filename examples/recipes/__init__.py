"""Small programs for common uses of jobs, each a file that runs.

Docs/recipes.md explains them.
"""
