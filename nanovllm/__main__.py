"""`python -m nanovllm`: the same as the program `nanovllm`."""

from nanovllm.jobs.main import program

if __name__ == "__main__":
    program()
