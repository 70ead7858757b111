"""Without an answer from the hub, libraries are told to read their cache only."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from harness.rank import data


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    data._answers.cache_clear()


def test_silence_is_settled_once() -> None:
    data.settle_hub("somebody/some-model")
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert data._answers.cache_info().misses == 1
    data.settle_hub("somebody/another")
    assert data._answers.cache_info().misses == 1


def test_a_local_folder_asks_nobody(tmp_path: Path) -> None:
    data.settle_hub(str(tmp_path))
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert data._answers.cache_info().misses == 0


def test_a_hub_that_answers_is_asked_for_files(
    monkeypatch: pytest.MonkeyPatch, httpserver_address: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", httpserver_address)
    data.settle_hub("somebody/some-model")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.fixture
def httpserver_address() -> str:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # says 501: an answer
    threading.Thread(target=server.handle_request, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
