"""Escapes are spelled out, and secrets are in no text, record or report."""

import json
from pathlib import Path

import pytest

from harness.record import ErrorPart
from harness.safe_text import capped, capped_tail, described, encodable, first_line, harmless, redacted
from harness.tell.report import write_report
from tests.records import ENVIRONMENT, JOB, saved


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x9b31m", "\x07", "a\rb", "\u202eabc", "\u2028", "\udc80", "\x7f"]
)
def test_what_a_terminal_would_obey_is_spelled_out(text: str) -> None:
    shown = harmless(text)
    assert shown.isprintable()
    assert "\\u" in shown


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (TypeError("'NoneType' object is not iterable"), "TypeError: 'NoneType' object is not iterable"),
        (KeyError("weight_map"), "KeyError: 'weight_map'"),
        (ValueError("no such head\nat all"), "no such head"),
        (RuntimeError(), "RuntimeError()"),
    ],
)
def test_one_line_tells_an_error_of_a_program_from_a_sentence(error: Exception, shown: str) -> None:
    assert first_line(error) == shown


def test_plain_text_in_any_script_and_its_layout_stay() -> None:
    text = "Größe 模型 🚀\n\tdone"
    assert harmless(text) == text


def test_json_keeps_its_meaning() -> None:
    text = json.dumps({"label": "a\x9b31m\u202e"}, ensure_ascii=False)
    assert json.loads(harmless(text)) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:q7Zq7Zq7Zq7Zq7Zq7Zq7Z@host/x",
        "s3://q7Zq7Zq7Zq7Zq7Zq7Zq7Z@bucket",
        "HF_TOKEN=q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        '"api_key": "q7Zq7Zq7Zq7Zq7Zq7Zq7Z"',
        "password: q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        "db_password=q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        "Authorization: Bearer q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        "?token=q7Zq7Zq7Zq7Zq7Zq7Zq7Z&x=1",
        "hf_q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        "AWS_SECRET_ACCESS_KEY=q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        "ghp_q7Zq7Zq7Zq7Zq7Zq7Zq7Z",
        "Authorization: Basic q7Zq7Zq7Zq7Zq7Zq7Zq7Zw==",
        "train.py --password q7Zq7Z --steps 3",
        '["--hf-token",\n "q7Zq7Z"]',
        "eyJhbGciOiJIUzI1NiJ9.eyJq7Zq7Zq7Zq7Zq7Zq7Zq7Z.q7Zq7Zq7Zq7Z",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nq7Zq7Zq7Z\nq7Zq7Z\n-----END OPENSSH PRIVATE KEY-----",
        '{\\"hf_token\\": \\"q7Zq7Zq7Zq7Zq7Zq7Zq7Z',
        "credentials=q7Zq7Zq7Z", "--credentials q7Zq7Z", "--gcs-credentials=q7Zq7Z", "db_pass: q7Zq7Z",
        'password = "q7Z q7Z, q7Z"', "passphrase='q7Z $ q7Z'", '["--password", "q7Z q7Z"]',
        "clientSecret: q7Zq7Z", "AccountKey=q7Zq7Zq7Z==;EndpointSuffix=x", "SharedAccessKey=q7Zq7Z",
        "x-api-key: q7Zq7Z", "AWS_SESSION_TOKEN=q7Zq7Z", "refreshToken: q7Zq7Z", "Set-Cookie: a=q7Z; b=q7Z",
        "Authorization: token q7Zq7Zq7Z", "AWS4-HMAC-SHA256 Credential=q7Z/us, Signature=" + "q7Z" * 20,
        "GET https://s3/x?X-Amz-Credential=q7Z%2Faws&X-Amz-Date=1&X-Amz-Signature=q7Zq7Z",
        "https://cdn/x?Policy=1&Signature=q7Z~q7Z&Key-Pair-Id=2", "https://blob/x?sv=1&sig=q7Z%3D",
        "https://maps/x?key=q7Zq7Z", "https://storage/x?x=1\\u0026X-Goog-Signature=q7Zq7Z",
        "AIza" + "q7Z" * 12, "ya29." + "q7Z" * 12, "GOCSPX-" + "q7Z" * 8, "xapp-1-q7Zq7Zq7Z-1",
        "sk-ant-api03-" + "q7Z" * 12, "gldt-" + "q7Z" * 8,
        "dckr_pat_" + "q7Z" * 8, "nvapi-" + "q7Z" * 8, "npm_" + "q7Z" * 12, "pypi-AgEI" + "q7Z" * 12,
        "sk_live_" + "q7Z" * 5, "hvs." + "q7Z" * 10, "https://hooks.slack.com/services/T0/B0/q7Zq7Zq7Z",
        "abc1Q~" + "q7Z" * 11, "api_org_" + "q7Z" * 8, "gsk_" + "q7Z" * 8,
        "curl -sS -u me:q7Zq7Z https://x", '["curl", "--user", "me:q7Zq7Z"]', "sshpass -p q7Zq7Z ssh node",
        "docker login -u me -p q7Zq7Z ghcr.io", "mysql -pq7Zq7Z db",
        "train.py -p q7Zq7Zq7Z", '["-p", "q7Zq7Zq7Z"]',
        "machine api.wandb.ai login user password q7Zq7Z",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: a-b\nq7Zq7Z",
        "train.py --key q7Zq7Z", "--wandb-key q7Zq7Z", '["--ssh_key", "q7Zq7Z"]', "--auth me:q7Zq7Z",
        "--pwd=q7Z", "--pw q7Zq7Z", "--encryption-key q7Zq7Z", "--api_keys q7Z", "--session-id q7Zq7Z",
        "--cookie a=q7Z",
        "OPENAI_KEY=q7Zq7Z", "WANDB_KEY: q7Zq7Z", "license_key='q7Z q7Z'", "sessionid=q7Zq7Z",
        '{"session-id": "q7Zq7Z"}', "JSESSIONID=q7Zq7Z", "csrftoken=q7Zq7Z", "login failed for pw=q7Zq7Z",
        "DB_PW='q7Z q7Z'", "HTTP_AUTH=me:q7Z", "auth=me:q7Zq7Z", "https://me:q7Z:q7Z@host/x",
        "postgres://me:q7Z/q7Z@host/x", "https://me:q7Z@q7Z@host/x",
        "--AUTH q7Zq7Z", "train.py --Key q7Zq7Z", "--Hub-Token=q7Z", "--PASSWORD q7Z", "KEY=q7Zq7Z",
        "KEY: 'q7Z q7Z'", "auth: q7Zq7Z", '"auth": "me:q7Z"', "HTTP_AUTH: q7Z", "Auth = q7Z", "Pwd: q7Z",
        "TEXT_ACCESS_KEY=q7Z", "AUDIO_SECRET=q7Z", "--data-secret-key q7Z", "LR_API_KEY: q7Z", "pw=3.q7Z",
        "Pw=q7Z", "pwd=1q7Z", "my_secret_auth=q7Z", "401 for token Aq7Zq7Zq7Z", "password is q7Zq7Zq7Z1",
        "key=SecretStr('q7Z q7Z')", "auth=('me', 'q7Z')", '"token": "q7Zq7Zq7Zq7Z"',
        "wandb login q7Zq7Zq7Zq7Z",
        "aws configure set aws_secret_access_key q7Zq7Zq7Zq7Z", "Ocp-Apim-Subscription-Key: q7Z",
    ],
)  # fmt: skip
def test_secrets_are_redacted(text: str) -> None:
    assert "q7Z" not in redacted(text)
    assert "***" in redacted(text)
    assert redacted(redacted(text)) == redacted(text)
    for document in (json.dumps([text, 1]), json.dumps({"log": json.dumps([text]), "x": 1})):
        assert "q7Z" not in redacted(document)
        json.loads(redacted(document))


def test_each_name_is_redacted_in_each_spelling() -> None:
    names = [
        "api_key", "access_key", "secret_key", "private_key", "encryption_key", "wandb_key",
        "password", "passwd", "db_password", "passphrase", "pwd", "hub_token", "auth_token",
        "access_token", "session_token", "vault_token", "client_secret", "credentials", "creds",
        "session_id", "pat", "jwt", "dsn", "webhook", "webhook_url", "connection_string",
    ]  # fmt: skip
    shown = [
        form
        for name in names
        for form in (
            f"--{name} q7Z", f"--{name.replace('_', '-')}=q7Z", f"MY_{name.upper()}=q7Z", f"{name}: q7Z",
            f"https://host/x?{name}=q7Z&a=1", f"{name}='q7Z q7Z'", json.dumps({name: "q7Z"}),
            f"X-{name.title().replace('_', '-')}: q7Z", f"Error({name}=q7Z)",
        )
        if "q7Z" in redacted(form)
    ]  # fmt: skip
    assert not shown


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize(
    "command",
    [
        "train.py --password q7Z --steps 3", "train.py --hub-token=q7Z", "sshpass -p q7Z ssh node",
        "docker login -u me -p q7Z host", "curl -u me:q7Z https://x", "train.py -p q7Zq7Zq7Z",
        "env HF_TOKEN=q7Z train.py", "train.py s3://me:q7Z@bucket",
    ],
)  # fmt: skip
def test_secrets_in_lists_of_words_are_redacted(command: str, separators: tuple[str, str]) -> None:
    document = json.dumps({"command": command.split(), "x": 1}, separators=separators)
    assert "q7Z" not in redacted(document)
    assert json.loads(redacted(document))["x"] == 1


@pytest.mark.parametrize(
    "text", ["ASIAQQQQQQQQQQQQQQQQ", "dop_v1_" + "0a" * 32, "dapi" + "0a" * 16, "wandb login " + "0a" * 20]
)
def test_tokens_of_few_letters_are_redacted(text: str) -> None:
    assert redacted(f"with {text} here").count("***") == 1


def test_numbers_of_a_document_stay() -> None:
    document = json.dumps({"api_key": 5, "secret": None, "password": [1.5e3], "credentials": {"a": True}})
    assert json.loads(redacted(document)) == json.loads(document)


@pytest.mark.parametrize(
    "text",
    [
        "1024 tokens: 5", "tokens_per_second=12.5", "pad_token_id: 0", "data.tokenizer=bytes", "https://host/a@b",
        "eos_token: </s>", '"password": null', "hf_offload",
        "--tokens-per-step 4M", "--max-tokens 12", "--tokenizer /models/x", "--token --next",
        "see: Basic usage",
        "model.name=meta-llama/Llama-3", "unexpected token: x",
        "TOKENIZERS_PARALLELISM=false", "MAX_TOKENS=4", "hf_tokenizer: llama", '"secret": true',
        "srun -p gpu -N 2", "mkdir -p /a/b", "sbatch -p a100-80g", "docker run -u 1000:1000 -p 8080:80 x",
        "PWD=/home/me", "forward_pass=3", "compass: north", "inspect.signature=x", "keys: 5", "sort_key=name",
        "--sort-key name", "--input_key prompt", "--key-size 4", "--keys a b", "--author me",
        "--auth-type basic", "PRIMARY_KEY=id", "MONKEY=banana", "AUTHOR=me", "auth: basic", "https://host:8443/repo@branch",
        "git+https://github.com/x/y@v1", "pwr=1", "step=3 pw",
        "https://host/x?page=2&sort=key", '"use_cookie": 1', "python -u train.py:main",
        "step_auth=0.3", "pw=3.2", "loss(pw=3.2)", "optim.pw=1e-3, x", '["optim.pw=3.2", 1]',
        "TEXT_KEY='text'", "OUTPUT_KEY=logits", "LR_KEY=lr", "IMAGE_KEY: pixel_values", "PRIMARY KEY: id2",
        "--train-key input_ids", "--audio-key wav", "--TEXT-KEY text", "--Label_Keys a", "KEY=text",
        "SECTION.KEY=VALUE", "auth: oauth2", "auth: v2", "auth: none", '"auth": "basic"', "oauth: hunter2",
        "step_auth: 0.3", "PWD=/home/me2", "sort(key=field2)", "secretary=jones99", "password_length=12",
        "credential_helper=store1", "token length 4096", "token 'Hello' is unknown", "path=a1",
        "--pattern A1b",
        "dispatch: x1", "key_value_heads=8", "num_key_value_heads: 4", "author: smith1", "secret sauce of T5",
        "token Qwen2TokenizerFast is unknown", "pat=value",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_long_text_is_cut_in_bytes() -> None:
    assert len(capped("ä" * 1000, 100).encode()) < 140
    assert capped("ä" * 1000, 100).startswith("ä" * 50)
    assert capped_tail("x" * 1000 + "end", 100).endswith("end")
    assert capped("short", 100) == capped_tail("short", 100) == "short"


def test_exceptions_that_cannot_be_shown_are_described() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    assert described(Silent()) == "Silent (its message cannot be shown: RuntimeError)"
    assert described(ValueError()) == "ValueError()"
    described(ValueError("\udc80")).encode()
    assert encodable("a\udc80") == "a\\udc80"


def test_a_message_of_50_megabytes_keeps_both_ends_and_no_secret() -> None:
    error = RuntimeError("password=hunter22hunter " + "x y " * 12_500_000 + "the end")
    said = described(error)
    assert said.startswith("password=***")
    assert len(said) < 9_000


def test_secrets_of_the_environment_are_replaced_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HF_TOKEN": "pla1nted-plain", "MY_PASSWORD": "short", "TOKENIZERS_PARALLELISM": "pla1nted-kept",
        "DB_PASSWORD_FILE": "/run/pla1nted-path", "TEXT_KEY": "pla1nted-column",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    said = redacted(
        "no access with pla1nted-plain; short, pla1nted-kept, /run/pla1nted-path, pla1nted-column"
    )
    assert said == "no access with ***; short, pla1nted-kept, /run/pla1nted-path, pla1nted-column"


@pytest.mark.parametrize("value", ['pla1"nt\\ed', "pla1nted\\", "pla1\nnted", "pl\u00e4nted1"])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_document_has_no_secret_in_the_spelling_of_json_either(
    value: str, ascii_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASSWORD", value)
    document = json.dumps({"said": [value, f"<{value}>"]}, ensure_ascii=ascii_only)
    assert json.loads(redacted(document)) == {"said": ["***", "<***>"]}


PLACES = {
    "address": "http://someone:pla1nted-ADDRESS@host/data.txt",
    "variable": "pla1nted-VARIABLE",
    "setting": "model.arguments={api_key: pla1nted-SETTING}",
    "option": "--hub-token=pla1nted-OPTION",
    "native configuration": "pla1nted-NATIVE",
    "message": "401 for Authorization: Bearer pla1nted-MESSAGE",
    "log": "export WANDB_API_KEY=pla1nted-LOG",
}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A sound run and one that failed, with a secret in each place."""
    job = JOB | {"data": JOB["data"] | {"source": "text", "path": PLACES["address"]}}
    environment = ENVIRONMENT | {"variables": {"HF_TOKEN": PLACES["variable"]}}
    command = ["harness", "run", "--set", PLACES["setting"], PLACES["option"]]
    error = ErrorPart(kind="HTTPError", message=PLACES["message"], log_tail=PLACES["log"])
    paths = []
    for name, more in (("sound", {}), ("failed", {"status": "failed", "error": error})):
        path = saved(
            tmp_path / "runs", name, label="ddp", job=job, environment=environment, command=command,
            backend={"native_config": {"wandb": {"password": PLACES["native configuration"]}}}, **more,
        )  # fmt: skip
        paths.append(path)
    return paths


@pytest.mark.parametrize("suffix", ["md", "html", "csv", "json"])
def test_no_report_and_no_record_has_a_planted_secret(suffix: str, runs: list[Path], tmp_path: Path) -> None:
    from harness.record.store import read_runs

    write_report(read_runs(runs)[0], tmp_path / "reports" / f"out.{suffix}")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert [path.name for path in files if b"pla1nted" in path.read_bytes()] == []


def test_secrets_were_planted(runs: list[Path]) -> None:
    """Each place is in the record, without its secret."""
    text = runs[1].read_text()
    assert text.count("***") >= len(PLACES)
    for word in ("HF_TOKEN", "api_key", "hub-token", "password", "Bearer", "WANDB_API_KEY", "host/data.txt"):
        assert word in text
