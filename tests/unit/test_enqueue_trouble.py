"""Redis's troubles in words: where, what, what to do; and never a password."""

from __future__ import annotations

import pytest
import redis

from enqueue.trouble import in_words, our_words
from worker.errors import BatonError, InvalidSettings, RedisUnavailable, StorageRefused, TaskNotFound
from worker.state.transact import connect, shown_url

URL = "redis://ann:geheim@box:6380/2?password=geheim"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "redis://***@box:6380/2"),
        ("redis://box/0", "redis://box/0"),
        ("redis://:ge@heim@box/0", "redis://***@box/0"),
        ("redis://:12#34@box", "redis://***@box"),
        ("unix:///run/valkey.sock?db=1", "unix:///run/valkey.sock"),
        ("box:6379", "BATON_REDIS_URL"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("url", ["box:6379", "http://box", "redis://:geh/eim@box", "redis://box:port", "redis://[x"])
def test_a_url_that_is_none_is_a_wrong_setting_and_is_not_repeated(url: str) -> None:
    with pytest.raises(InvalidSettings, match="BATON_REDIS_URL") as raised:
        connect(url)
    assert "eim" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (redis.AuthenticationError("WRONGPASS"), RedisUnavailable, "refuses our credentials"),
        (redis.BusyLoadingError("loading"), RedisUnavailable, "still loading"),
        (redis.TimeoutError("Timeout"), RedisUnavailable, "does not answer in time"),
        (redis.ConnectionError("refused"), RedisUnavailable, "`baton up`"),
        (redis.ResponseError("NOPERM no"), StorageRefused, "refuses: NOPERM no"),
        (RuntimeError("what"), BatonError, "what"),
    ],
)
def test_each_trouble_has_its_own_words(error: Exception, kind: type[BatonError], said: str) -> None:
    worded = in_words(error, URL)

    assert type(worded) is kind
    assert said in str(worded)
    assert "geheim" not in str(worded)
    if kind is not BatonError:
        assert "redis://***@box:6380/2" in str(worded)


def test_what_the_store_says_is_put_into_words_once() -> None:
    def from_the_store() -> None:
        try:
            raise redis.ConnectionError("refused")
        except redis.ConnectionError as error:
            raise RedisUnavailable(f"no answer: {error}") from error

    with pytest.raises(RedisUnavailable) as raised, our_words(URL), our_words(URL):
        from_the_store()
    assert str(raised.value).count("no Redis at") == 1


def test_errors_of_ours_pass_through_as_they_are() -> None:
    error = TaskNotFound("mine")
    with pytest.raises(TaskNotFound) as raised, our_words(URL):
        raise error
    assert raised.value is error
    assert in_words(error, URL) is error
