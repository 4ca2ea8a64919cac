"""A stand-in for SGLang, found before the installed one by servers that have this folder's parent on PYTHONPATH."""
