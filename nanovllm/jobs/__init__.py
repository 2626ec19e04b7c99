"""Jobs: the commands `nanovllm run`, `check` and `version`, which answer whole files of prompts row by row.

A job reads its input as a stream and writes each answer to disk as soon as it is finished, so that the same
command resumes it. `LLM.stream` runs the prompts; nothing here schedules or computes.
"""
