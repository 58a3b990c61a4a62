"""Options: unknown names, values out of range, and the one spelling of speculation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline import methods
from paceline.errors import OptionError, PacelineError
from paceline.options import NEUTRAL, OTHER_METHODS, RULES, Speculation, integer, number, reject_unknown
from paceline.request import Request
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from pathlib import Path


def test_an_unknown_name_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(OptionError, match=r"'temprature' is not an option of Sampling; did you mean 'temperature'\?"):
        reject_unknown("Sampling", ["top_p", "temprature"], ["temperature", "top_p"])
    with pytest.raises(OptionError, match=r"'zzz' is not an option of Sampling\.$"):
        reject_unknown("Sampling", ["zzz"], ["temperature", "top_p"])
    reject_unknown("Sampling", ["top_p"], iter(["temperature", "top_p"]))


def test_option_errors_are_value_errors_too() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, PacelineError)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1]])
def test_a_whole_number_is_an_int(value: object) -> None:
    with pytest.raises(OptionError, match="n is a whole number"):
        integer("n", value, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, 1.1])
def test_numbers_outside_their_range_are_refused(value: float) -> None:
    with pytest.raises(OptionError, match=r"p is .*; it must be 0 to 1"):
        number("p", value, 0.0, 1.0)


@pytest.mark.parametrize("value", [True, "0.5", None])
def test_a_number_is_an_int_or_a_float(value: object) -> None:
    with pytest.raises(OptionError, match="p is a number"):
        number("p", value, 0.0)


def test_left_out_it_is_auto() -> None:
    speculation = Speculation.parse({})
    assert speculation == Speculation() == Speculation.parse(True) == Speculation.parse("auto")
    assert (speculation.enabled, speculation.method, speculation.rule) == (True, "auto", "coupled")
    assert (speculation.adaptive, speculation.tree, speculation.num_speculative_tokens) == (True, "auto", None)
    assert speculation.ceiling(paced=True) == 63
    assert speculation.ceiling(paced=False) == 5
    assert [Speculation(num_speculative_tokens=9).ceiling(paced) for paced in (True, False)] == [9, 9]


@pytest.mark.parametrize(
    "value",
    [
        *(None, False, "off", "none"),
        *({"enabled": False}, {"method": "off"}, {"num_speculative_tokens": 0}, {"num_draft_tokens": 0}),
    ],
)
def test_plain_decoding(value: Any) -> None:
    assert not Speculation.parse(value).enabled
    assert not Speculation.parse(value, Speculation(method="ngram")).enabled


def test_text_is_a_method() -> None:
    assert Speculation.parse("ngram") == Speculation(method="ngram")


def test_a_call_overrides_what_it_names() -> None:
    engine = Speculation(method="ngram", num_speculative_tokens=7, adaptive=False)
    assert Speculation.parse({}, engine) == engine
    assert Speculation.parse({"num_speculative_tokens": 3}, engine).method == "ngram"
    assert Speculation.parse({"num_speculative_tokens": 3}, engine).num_speculative_tokens == 3
    assert not Speculation.parse({"num_speculative_tokens": 3}, engine).adaptive
    assert Speculation.parse({"draft_layers": 4}, engine).draft_layers == 4
    drafting = Speculation(draft_layers=4)
    assert Speculation.parse("ngram", drafting) == Speculation(method="ngram")
    assert Speculation.parse({"model": "small"}, drafting) == Speculation(model="small")


def test_a_call_switches_a_plain_engine_on_by_naming_anything() -> None:
    off = Speculation.off()
    assert Speculation.parse({"method": "ngram"}, off).enabled
    assert Speculation.parse(True, off).enabled
    assert not Speculation.parse({}, off).enabled


@pytest.mark.parametrize("method", ["ngram", "suffix", "recycling"])
def test_a_method_without_a_model_drops_the_one_that_was_set_up(method: str) -> None:
    assert Speculation.parse(method, Speculation(draft_layers=4)) == Speculation(method=method)


def test_drafters_are_shared_where_what_they_are_made_from_is_equal() -> None:
    def made(**options: Any) -> tuple[object, ...]:
        return methods.recipe(Speculation(**options))

    assert made() == made(method="cascade", num_speculative_tokens=9, adaptive=False)
    assert made(method="ngram") == made(method="ngram", num_speculative_tokens=9, adaptive=False, tree="none")
    assert made(method="ngram") != made(method="ngram", prompt_lookup_max=9)
    assert made(draft_layers=3, method="draft_model") != made(draft_layers=4, method="draft_model")
    for method in ("suffix", "recycling"):
        assert made(method=method) == made(method=method, num_speculative_tokens=9)
        assert made(method=method) != made(method=method, tree="none")
    rules = {rule: made(draft_layers=3, method="draft_model", rule=rule) for rule in RULES}
    assert rules["coupled"] == rules["typical"]
    assert rules["ratio"] == rules["block"]
    assert rules["recursive"] == rules["traversal"]
    assert len(set(rules.values())) == 3
    for option, value in {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 5,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.2,
    }.items():
        assert made(method="suffix") != made(method="suffix", **{option: value})


def test_the_file_of_a_tree_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    speculation = Speculation(method="recycling", tree=str(file), adaptive=False)
    file.unlink()
    assert speculation.ceiling(paced=False) == 3
    assert speculation.shape is speculation.shape is not None
    with pytest.raises(OptionError, match="cannot be read"):
        replace(speculation, adaptive=True)


def test_an_alias() -> None:
    assert Speculation.parse({"num_draft_tokens": 3}).num_speculative_tokens == 3
    assert Speculation.parse({"num_draft_tokens": 3, "num_speculative_tokens": 3}).num_speculative_tokens == 3
    with pytest.raises(OptionError, match="the two differ"):
        Speculation.parse({"num_draft_tokens": 3, "num_speculative_tokens": 4})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"num_spec_tokens": 3}, "'num_spec_tokens' is not an option of speculation; did you mean 'num_spec"),
        ({"num_speculative_tokens": 100}, "is 100; a token tree has room for 63"),
        ({"num_speculative_tokens": 64}, "64.*63"),
        ({"num_speculative_tokens": -1}, "at least 0"),
        ({"num_speculative_tokens": 2.5}, "whole number"),
        ({"num_speculative_tokens": True}, "whole number"),
        ({"model": "small", "draft_layers": 3}, "exclude each other"),
        ({"prompt_lookup_max": 4}, "prompt_lookup_max is an option of ngram; method 'cascade' does not read it"),
        ({"method": "ngram", "lookahead_window": 4}, "an option of lookahead; method 'ngram' does not read it"),
        ({"method": "ngram", "vocabulary": "same"}, "an option of .*draft_model.*; method 'ngram' does not read it"),
        ({"suffix_decoding_max_tree_depth": 1}, "2 to 1024"),
        ({"suffix_decoding_max_cached_requests": -1}, "at least 0"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "at least 0"),
        ({"suffix_decoding_min_token_prob": 1.5}, "0 to 1"),
        ({"suffix_decoding_min_token_prob": "high"}, "is a number"),
        ({"draft_layers": 0}, "at least 1"),
        ({"model": ""}, "names a draft model"),
        ({"method": "ngrm"}, "'ngrm' is unknown; choose from auto, .*ngram"),
        ({"method": 3}, "unknown"),
        ({"rule": "strict"}, "rule 'strict' is not part of this version; choose from coupled"),
        ({"rule": "cupled"}, "unknown; choose from coupled"),
        ({"tree": "no/tree.json"}, "tree names 'no/tree.json', which cannot be read"),
        ({"vocabulary": "other"}, "unknown; choose from auto, same, intersection, retokenized"),
        ({"random": 1}, "true or false"),
        ({"lookahead_ngram": 1}, "at least 2"),
        ({"tree": 0}, "1 to 63"),
        ({"tree": 64}, "1 to 63"),
        ({"prompt_lookup_min": 0}, "at least 1"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "min is 4, above prompt_lookup_max, 3"),
        ({"adaptive": "yes"}, "true or false"),
        ({"enabled": 1}, "true or false"),
        ({"quantization": "fp8"}, "quantization='fp8' is not supported"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 is not supported"),
        ({"disable_by_batch_size": 8}, "disable_by_batch_size=8"),
        ({"rejection_sample_method": "synthetic"}, "synthetic"),
        (5, "speculation is a mapping"),
        (["ngram"], "speculation is a mapping"),
    ],
)
def test_refused(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Speculation.parse(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "draft_model"}, "model=.*draft_layers="),
        ({"model": "small", "method": "ngram"}, "model is given, and method 'ngram' drafts without"),
        ({"draft_layers": 3, "method": "ngram"}, "draft_layers is given, and method 'ngram' drafts without"),
        ({"draft_layers": 3, "method": "suffix"}, "draft_layers is given, and method 'suffix' drafts without"),
        ({"model": "small", "method": "recycling"}, "model is given, and method 'recycling' drafts without"),
        *(
            ({"rule": rule, "method": "ngram"}, f"rule '{rule}' needs drafts that are drawn .* 'ngram' .*draft_model")
            for rule in ("ratio", "block", "recursive", "traversal")
        ),
        ({"method": "ngram", "tree": 3}, "'ngram' drafts chains, and tree is 3"),
        ({"method": "ngram", "random": True}, "random is for .* eagle3, medusa.*, and 'ngram' has none"),
        ({"method": "eagle"}, "'eagle' needs a head that was trained for the target: name its checkpoint with model="),
        ({"method": "medusa", "draft_layers": 2}, "draft_layers is given, and method 'medusa' drafts without"),
        ({"rule": "ratio", "draft_layers": 2}, "rule 'ratio' needs drafts .*'cascade'"),
        (
            {"rule": "ratio", "method": "draft_model", "draft_layers": 2, "tree": 3},
            "'ratio' accepts chains, and tree is 3",
        ),
        (
            {"rule": "block", "method": "draft_model", "draft_layers": 2, "tree": 3},
            "'block' accepts chains, and tree is 3",
        ),
    ],
)
def test_a_method_and_a_draft_model_that_do_not_go_together(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        methods.check(Speculation.parse(value))


@pytest.mark.parametrize(
    "value",
    [
        *(
            {"rule": rule, "method": "draft_model", "draft_layers": 2}
            for rule in ("ratio", "block", "recursive", "traversal", "typical")
        ),
        {"rule": "ratio", "method": "draft_model", "draft_layers": 2, "tree": 1},
        {"rule": "recursive", "method": "draft_model", "draft_layers": 2, "tree": 3},
        {"method": "eagle3", "random": True},
        {"rule": "typical", "method": "ngram"},
    ],
)
def test_rules_and_methods_that_fit(value: Any) -> None:
    methods.check(Speculation.parse(value))


@pytest.mark.parametrize("method", [*OTHER_METHODS, "deepseek_mtp"])
def test_methods_of_others_are_refused_by_name(method: str) -> None:
    with pytest.raises(OptionError, match=f"'{method}' is not part of this version"):
        Speculation.parse(method)


@pytest.mark.parametrize("key", NEUTRAL)
def test_keys_of_others_are_taken_where_they_change_nothing(key: str) -> None:
    for value in NEUTRAL[key]:
        assert Speculation.parse({"method": "ngram", key: value}) == Speculation(method="ngram")
    with pytest.raises(OptionError, match=f"{key}='something' is not supported"):
        Speculation.parse({key: "something"})


def test_the_bounds_of_a_lookup_follow_the_one_that_is_named() -> None:
    assert Speculation.parse({"method": "ngram", "prompt_lookup_min": 8}).prompt_lookup_max == 8
    assert Speculation.parse({"method": "ngram", "prompt_lookup_max": 1}).prompt_lookup_min == 1


@pytest.mark.parametrize("rule", ["ratio", "block", "recursive", "traversal", "typical"])
def test_a_seed_fixes_how_many_are_drafted_where_the_tokens_depend_on_it(rule: str) -> None:
    """As many as without the pacer, not as many as could ever pay."""

    def request(**sampling: Any) -> Request:
        speculation = Speculation(method="draft_model", draft_layers=1, rule=rule)
        return Request((1,), Sampling(**sampling), 0, 0, frozenset(), 9, speculation, 9)

    assert (request(seed=3).paced, request(seed=3).ceiling) == (False, 5)
    assert (request().paced, request().ceiling) == (True, 63)
