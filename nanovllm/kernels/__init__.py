"""Device kernels, one operation per file: the Triton kernel, its launcher `<op>_triton`, its plain torch twin
`<op>_reference` and the dispatcher `<op>`. Nothing here knows of sequences, layers or engines.
"""
