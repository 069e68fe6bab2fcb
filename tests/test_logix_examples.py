"""The examples of logix run, with short settings, and what they find is right."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import logix  # noqa: E402
from example_files import EXAMPLES, load  # noqa: E402


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_attribute_digits(one_thread, tmp_path, capsys):
    example = load("attribute_digits")
    state = torch.random.get_rng_state()
    found = example.main(**example.QUICK, out=tmp_path)
    printed = capsys.readouterr().out
    assert torch.equal(state, torch.random.get_rng_state())
    assert found["accuracy"] > 0.9

    # Scores predict what retraining does, and curvature makes them better.
    quality = found["lds"]
    assert quality["none"] > 0.2
    for kind in ("kfac", "ekfac"):
        assert quality["none"] + 0.1 < quality[kind] < quality["ceiling"] <= 1

    # Planted errors are found: by chance, one in twenty would be.
    assert min(found["auroc"].values()) > 0.9
    assert min(found["precision"].values()) > 0.5

    # What it wrote, and what it printed of it.
    for name in ("digits", "digits-wrong"):
        run = logix.LogIX(name, {"root_dir": str(tmp_path / "logix")})
        run.initialize_from_log()
        assert run.store().ids == list(range(example.TRAIN))
        assert run.statistics
    assert (tmp_path / "attribute_digits.png").stat().st_size > 10_000
    assert f"preconditioned by kfac     {quality['kfac']:.3f}" in printed
    assert f"{quality['ceiling']:.3f}" in printed


def test_planted_errors_are_errors():
    example = load("attribute_digits")
    (_, y), _ = example.digits()
    labels, is_wrong = example.with_errors(y)
    assert is_wrong.sum() == example.WRONG
    assert ((labels != y).numpy() == is_wrong).all()
    assert labels.min() == 0
    assert labels.max() == 9


def test_attribute_lm(one_thread, tmp_path, capsys):
    pytest.importorskip("transformers")
    example = load("attribute_lm")
    state = torch.random.get_rng_state()
    found = example.main(**example.QUICK, out=tmp_path)
    printed = capsys.readouterr().out
    assert torch.equal(state, torch.random.get_rng_state())
    assert found["right"] > 0.8  # else there is nothing to explain

    # The sentence with the highest score states the fact: by chance, one in forty would.
    assert found["chance"] == pytest.approx(1 / 40)
    for kind in ("kfac", "ekfac"):
        assert found["first"][kind] > 0.4
        assert f"preconditioned by {kind}" in printed

    # Most of it comes from the place where the model had to tell the answer.
    words = found["words"]
    assert max(words, key=lambda place: place[2])[1] == found["answer"]

    run = logix.LogIX("facts", {"root_dir": str(tmp_path / "logix")})
    run.initialize_from_log()
    assert run.store().ids == list(range(200))
    assert (tmp_path / "attribute_lm.png").stat().st_size > 10_000


def test_made_up_facts_are_as_the_file_says():
    pytest.importorskip("transformers")
    example = load("attribute_lm")
    facts = example.read(EXAMPLES / "data" / "made_up_facts.txt")
    assert len(facts) == 40
    sentences = [s for fact in facts for s in fact.sentences]
    assert len(sentences) == len(set(sentences)) == 200
    for fact in facts:
        name = fact.name.split(":")[0].split(", ")[1]
        assert len(fact.sentences) == 5
        assert all(name in s.split() and s.split()[-1] == fact.answer for s in fact.sentences)
        assert f"{fact.question} {fact.answer}" not in sentences  # kept from training
        wording = fact.question.replace(name, "…")
        others = [s.replace(other, "…") for s in sentences for other in s.split()]
        assert any(s.startswith(wording) for s in others)  # but others of its kind have it
    # Neither the name nor the answer alone tells the fact.
    names = [f.name.split(":")[0] for f in facts]
    assert all(names.count(name) == 2 for name in names)
    answers = [f.answer for f in facts]
    assert sum(answers.count(a) > 1 for a in answers) > len(answers) / 2
