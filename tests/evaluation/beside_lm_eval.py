"""CPU seconds of our scoring beside lm-eval's own model: the same tasks, documents, weights, dtype, one thread in turn.

    COMPRESS_DATA_DIR=FOLDER OMP_NUM_THREADS=1 python tests/evaluation/beside_lm_eval.py BATCH…

Counted is the scoring alone: no imports, no loading, no tokenising. Both must give the same accuracies.
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.evaluation import accuracy
from compress.job import weights_folder
from compress.models.files import max_positions, read_config
from compress.models.source import resolve
from compress.models.words import tokenizer

TASKS = ["arc_easy", "hellaswag", "piqa", "winogrande", "openbookqa", "lambada_openai"]
DOCUMENTS = list(range(0, 120, 3))


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`work`, whose CPU seconds are added to `spent`."""

    def run(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        found = work(*args, **options)
        spent.append(time.process_time() - start)
        return found

    return run


def accuracies(model: Any, tasks: Mapping[str, Any]) -> dict[str, float]:
    """Of every task, by lm-eval's own evaluation."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks.values()), samples=dict.fromkeys(TASKS, DOCUMENTS), bootstrap_iters=0
    )
    assert found
    return {name: found["results"][name]["acc,none"] for name in TASKS}


def main(batches: list[int]) -> None:
    """A line for ours and one for each batch size of lm-eval's, twice."""
    torch.set_num_threads(1)
    folder, tasks = weights_folder(resolve("smollm2-135m", weights=True)), accuracy.load_tasks(TASKS)
    accuracy.tell = lambda *_: None
    request = {"model": str(folder), "runtime": "hf", "dtype": "float32", "threads": 1}
    for _ in range(2):
        ours: list[float] = []
        scorer = timed(accuracy._scorer(request), ours)
        wanted = accuracies(accuracy.Scored(scorer, tokenizer(folder), max_positions(read_config(folder))), tasks)
        sys.stdout.write(f"ours: {sum(ours):.1f} CPU s\n")
        for batch in batches:
            whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            model, theirs = (
                HFLM(pretrained=whole, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=batch),
                [],
            )
            model._loglikelihood_tokens = timed(model._loglikelihood_tokens, theirs)
            assert accuracies(model, tasks) == wanted
            sys.stdout.write(
                f"lm-eval, batches of {batch}: {sum(theirs):.1f}, ours {sum(ours) / sum(theirs):.2f} of it\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main([int(batch) for batch in sys.argv[1:]])
