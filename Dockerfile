# nanovllm on a CPU: docker build -t nanovllm . && docker run --rm -v "$PWD:/data" nanovllm run prompts.jsonl \
#     -o answers.jsonl --model /data/model
FROM python:3.11.14-slim-bookworm

ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY nanovllm nanovllm
RUN pip install --no-cache-dir -c constraints.txt ".[cpu,gguf,jobs,structured]"

RUN useradd --create-home --uid 1000 nanovllm
USER nanovllm
WORKDIR /data
ENTRYPOINT ["nanovllm"]
CMD ["--help"]
