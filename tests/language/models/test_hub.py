"""Upload a student: what leaves the machine, to which repository, and what is refused before."""

import shlex
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers")

import huggingface_hub  # noqa: E402

from ssl_kd.cli.flags import read_settings  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.language.distillation import DistilledRun, distilled  # noqa: E402
from ssl_kd.language.models.card import model_card, without_folders  # noqa: E402
from ssl_kd.language.models.causal import load_causal_lm  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402

ASKED = {"push_to_hub": True, "hub_model_id": "me/pupil"}


@pytest.fixture
def hub(monkeypatch):
    """The client of the Hub, with the signatures of the real one and no network."""
    api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = huggingface_hub.RepoUrl("https://huggingface.co/me/pupil")
    api.model_info.return_value = SimpleNamespace(private=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return api


def test_a_run_uploads_its_student_and_a_card_without_folders(settings, models, hub, tmp_path):
    path = distilled(settings(**ASKED, teacher_text=0.5)).path
    (path / "student" / ".env").write_text("KEY=secret")
    assert DistilledRun(path).push_to_hub("me/pupil") == "https://huggingface.co/me/pupil"
    student = {file.name: file.read_bytes() for file in (path / "student").iterdir()}
    (name, first), (_, added) = [call.args for call in hub.create_commit.call_args_list]
    files = {file.path_in_repo: b64decode(file.b64content()) for file in added}
    assert name == "me/pupil" and [*files] == [file.path_in_repo for file in first]
    assert files.keys() == student.keys() - {".env"}
    changed = "README.md", "text_teacher.txt"
    assert all(files[name] == student[name] for name in files if name not in changed)
    assert not any(str(tmp_path.parent).encode() in content for content in files.values())
    assert [call.kwargs["private"] for call in hub.create_repo.call_args_list] == [True] * 3
    card: Any = huggingface_hub.ModelCard(files["README.md"].decode())
    assert card.data.model_name == "me/pupil"
    assert "# me/pupil\n" in card.text and '.from_pretrained("me/pupil")' in card.text
    results = {r.metric_type: r.metric_value for r in card.data.eval_results}
    scores = {name: DistilledRun(path).scores[name]["student"] for name in results}
    assert results == {name: float(f"{scores[name]:.4g}") for name in scores} and "kl" in results
    facts = dict(line[2:].split(": ", 1) for line in card.text.splitlines() if line[:2] == "- ")
    assert facts["teacher"] == f"teacher ({load_causal_lm(models('teacher')).weights_id[:16]})"
    assert facts["loss"] == "0.5 * cross-entropy + 0.5 * T^2 * forward_kl, T = 2"
    assert facts["guard"] == "0 events, 6 steps, 6 with ce, 6 with kd"
    flags = shlex.split(facts["command"].strip("`"))[2:]
    again = read_settings(LanguageSettings, flags, Path("none"), prog="card")
    assert again.data_path == facts["data"] == "tiny_train.jsonl" and again.temperature == 2


def test_uploads_are_checked_before_training(settings, hub, models):
    with pytest.raises(InputError, match="HUB_MODEL_ID is None: set HUB_MODEL_ID"):
        settings(push_to_hub=True)
    hub.model_info.return_value.private = False
    with pytest.raises(InputError, match="it is public; --hub_private_repo False publishes"):
        distilled(settings(**ASKED))
    hub.auth_check.side_effect = OSError("403 Forbidden")
    with pytest.raises(InputError, match="cannot be used: 403 .* set HF_TOKEN"):
        distilled(settings(**ASKED, hub_private_repo=False))
    assert not Path(settings().runs_dir).exists()
    adapters = distilled(settings(lora_rank=2, student_model=models("student")))
    with pytest.raises(InputError, match="has adapters on .* upload the merged model"):
        adapters.push_to_hub("me/pupil", private=False)
    hub.create_commit.assert_not_called()


def test_the_card_names_base_and_data_of_the_hub_and_no_folder(tmp_path):
    rows = [{"name": "teacher"}, {"name": "student", "perplexity": 3.14159, "kl": None}]
    card = model_card("a", rows, "Qwen/Qwen3-0.6B", True, False, {"data": "hf:us/stories:main"})
    data = huggingface_hub.ModelCard(card).data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("Qwen/Qwen3-0.6B", "adapter")
    assert data["datasets"] == ["us/stories"] and "license" not in data
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 3.142
    (tmp_path / "a folder, of mine").mkdir()
    names = without_folders(f"{tmp_path}/a folder, of mine"), without_folders("0.5*~/gone/A, B/C")
    assert names == ("a folder, of mine", "0.5*A, B/C")
    assert without_folders("math=/home/me/A, code=B/C") == "math=A, code=B/C"
    assert without_folders(long := "word " * 100) == long  # longer than a file's name may be
    local = model_card("a", [{"name": "teacher /home/me/A"}], "", True, False, {})
    assert "teacher A |" in local and "/home" not in local
