"""A job from Python: a file of rows in, a file of answers out; run it again after any end, and it resumes.

python examples/job.py [MODEL]      (writes answers.jsonl and report.html into a temporary folder)
"""

import json
import sys
import tempfile
from pathlib import Path

from nanovllm import demo_model_path
from nanovllm.jobs.main import main as nanovllm

WORDS = ["LEVELS", "BANANA", "NOTEBOOK", "ORANGES"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model_path()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.csv"
        rows.write_text("number,word\n" + "".join(f"{index},{word}\n" for index, word in enumerate(WORDS)))
        answers = folder / "answers.jsonl"
        command = ["run", str(rows), "-o", str(answers), "--model", model, "--chat", "--id-column", "number"]
        command += ["--template", "Reverse the word {word}.", "--sampling", "temperature=0,max_tokens=100"]
        command += ["--report", str(folder / "report.html")]
        code = nanovllm(command)  # the exit code of `nanovllm run`: 0 if every row has an answer
        print(f"exit code {code}; again: {nanovllm(command)}, as nothing is left to do")
        for line in answers.read_text().splitlines():
            row = json.loads(line)
            print(f"{row['id']} {row['word']}: {row['text'].splitlines()[-1]}")


if __name__ == "__main__":
    main()
