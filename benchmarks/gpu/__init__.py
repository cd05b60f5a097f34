"""What only a GPU can show, as three commands of minutes: ``python -m benchmarks.gpu check | bench | ranks``.

benchmarks/README.md says what each of them does.
"""
