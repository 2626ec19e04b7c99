"""`python -m nanovllm`: the same as the program `nanovllm`."""

import sys

from nanovllm.jobs.main import main

if __name__ == "__main__":
    sys.exit(main())
