"""One engine in a process of its own, for measurements side by side.

Runs under the Python in which that engine is installed, so nothing outside the standard library is imported before
the engine is known::

    PYTHON -P peer_worker.py KIND MODEL THREADS

Speaks JSON, one object a line. At the start it says ``{"version": ...}``; then it answers ``{"ids": [...],
"count": n}``, a prompt and how many tokens to decode greedily after it, with ``{"ids": [...], "first": s, "rest":
s}``: the tokens, the seconds from the call to the first of them, and the seconds from the first to the last. It ends
with its standard input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONTEXT = 2048
OURS = "paceline"


class Engine(Protocol):
    """Something that decodes."""

    version: str

    def decode(self, ids: Sequence[int], count: int, seen: Callable[[int], None]) -> None:
        """Decode ``count`` tokens greedily after a prompt, whatever they are, none of it known from an earlier call.

        Args:
            seen: is called with each token as soon as it is there.
        """


class Paceline:
    """Plain decoding in int8, without a cache of prefixes."""

    def __init__(self, model: str, threads: int) -> None:
        from paceline.llm import LLM

        self.version = version(OURS)
        plain: dict[str, Any] = {"speculation": False, "enable_prefix_caching": False}
        self._llm = LLM(model, dtype="int8", threads=threads, max_num_seqs=1, **plain)

    def decode(self, ids: Sequence[int], count: int, seen: Callable[[int], None]) -> None:
        from paceline.sampling import Sampling

        sampling = Sampling(temperature=0, max_tokens=count, ignore_eos=True)
        for chunk in self._llm.stream(ids, sampling, speculation=False):
            for token in chunk.token_ids:
                seen(token)


class Transformers:
    """A loop around the model's forward pass in bf16, which is less work a token than its ``generate``."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        self.version = f"{version('transformers')} on torch {torch.__version__}"
        self._torch, self._cache = torch, DynamicCache
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True)
        known = signature(self._model.forward).parameters
        self._keyword = "cache" if "cache" in known else "past_key_values"  # its name changed

    def decode(self, ids: Sequence[int], count: int, seen: Callable[[int], None]) -> None:
        rows = self._torch.tensor([list(ids)])
        state = {self._keyword: self._cache(config=self._model.config)}
        with self._torch.inference_mode():
            for _ in range(count):
                logits = self._model(rows, **state, use_cache=True, logits_to_keep=1).logits
                rows = logits[:, -1:].argmax(-1)
                seen(int(rows))


class OpenVino:
    """OpenVINO GenAI's pipeline for a folder of its own format, with its settings but one: no cache of prefixes."""

    def __init__(self, model: str, threads: int) -> None:
        import numpy as np
        import openvino_genai

        self.version = version("openvino-genai")
        self._array, self._tensor = np.array, import_module("openvino").Tensor
        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = CONTEXT  # a prompt in one piece, as without a scheduler
        self._pipeline = openvino_genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )

    def decode(self, ids: Sequence[int], count: int, seen: Callable[[int], None]) -> None:
        class Streamer(self._genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, tokens: Any) -> Any:
                for token in [tokens] if isinstance(tokens, int) else tokens:
                    seen(token)
                return running

            def end(self) -> None:
                """Nothing is left to do."""

        running = self._genai.StreamingStatus.RUNNING
        rows, mask = (self._tensor(self._array([row], dtype="int64")) for row in (list(ids), [1] * len(ids)))
        prompt = self._genai.TokenizedInputs(rows, mask)
        config = self._genai.GenerationConfig(max_new_tokens=count, do_sample=False, ignore_eos=True)
        self._pipeline.generate(prompt, config, Streamer())


class LlamaCpp:
    """llama.cpp's own calls for a GGUF file, with its settings; the binding's Python around them is left out."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self.version = f"llama-cpp-python {version('llama-cpp-python')}"
        self._api = api = llama_cpp
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self._model:
            raise OSError(f"llama.cpp cannot load {model}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, params)
        self._greedy = api.llama_sampler_init_greedy()

    def decode(self, ids: Sequence[int], count: int, seen: Callable[[int], None]) -> None:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        rows = list(ids)
        for _ in range(count):
            held = (api.llama_token * len(rows))(*rows)  # the batch has only its address
            if api.llama_decode(self._context, api.llama_batch_get_one(held, len(rows))) != 0:
                raise RuntimeError(f"llama.cpp failed on {len(rows)} tokens")
            rows = [api.llama_sampler_sample(self._greedy, self._context, -1)]
            seen(rows[0])


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    OURS: Paceline,
    "transformers": Transformers,
    "openvino": OpenVino,
    "llama.cpp": LlamaCpp,
}


def timed(engine: Engine, ids: Sequence[int], count: int) -> dict[str, Any]:
    """Decode ``count`` tokens after a prompt: the answer to one request."""
    tokens: list[int] = []
    times: list[float] = []

    def seen(token: int) -> None:
        times.append(perf_counter())
        tokens.append(token)

    start = perf_counter()
    engine.decode(ids, count, seen)
    return {"ids": tokens, "first": times[0] - start, "rest": times[-1] - times[0]}


def main() -> None:
    """Answer until standard input ends."""
    kind, model, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print; only answers may go where answers are read
    engine = ENGINES[kind](model, int(threads))
    print(json.dumps({"version": engine.version}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(timed(engine, asked["ids"], asked["count"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
