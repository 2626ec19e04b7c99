"""Jobs: the commands `nanovllm run`, `check` and `version`. Whole files of prompts, answered row by row.

A job reads its input as a stream and writes each answer to disk when it is finished, so that the same command
goes on where the last one ended. What runs a prompt is `LLM.stream`; nothing here schedules or computes.
"""
