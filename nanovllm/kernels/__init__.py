"""Device kernels, one operation per file: the Triton kernel, its launcher `<op>_triton`, whose docstring
defines the operation, its reference in plain torch `<op>_reference`, and `<op>`, which selects one of the two
by device. Nothing here knows sequences, layers or engines.
"""
