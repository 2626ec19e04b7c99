"""Device kernels, one operation per file: the Triton kernel, its launcher `<op>_triton`, which says what the
operation is, its plain torch twin `<op>_reference`, and `<op>`, which takes one of the two by the device.
Nothing here knows of sequences, layers or engines.
"""
