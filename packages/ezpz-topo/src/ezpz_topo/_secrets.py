"""Remove secrets from text and records: known by the name beside them, or by their form.

A record without a harmless value is still of use; one with a password is not, so in doubt a
value is removed. Usual words of training scripts are kept: ``--tokenizer``, ``--max-tokens``,
``--num-key-value-heads``, ``--image-key``, ``PWD``, ``KEYBOARD``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

Value = TypeVar("Value")
REDACTED = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset({
    "token", "auth", "oauth", "authorization", "authentication", "bearer", "cookie", "cookies",
    "session", "sessionid", "jwt", "pat", "pass", "pw", "signature", "webhook", "webhooks",
})  # fmt: skip
_WITHIN = (
    "secret", "password", "passwd", "passphrase", "credential", "apikey", "accesskey",
    "privatekey", "signingkey", "encryptionkey", "authkey", "sshkey", "accountkey", "masterkey",
)  # fmt: skip
"""Parts that no harmless name contains, for names without a border such as PGPASSWORD."""
_AT_THE_END = ("token", "cookie", "pass", "pwd")
_HARMLESS = ("compass", "bypass", "surpass", "trespass", "overpass", "underpass", "oldpwd")
"""The end of a word: HFTOKEN, JOBCOOKIE, MYPASS, but not TOKENIZER, COMPASS."""
_OF_TEXT = frozenset({
    "bos", "eos", "pad", "unk", "mask", "sep", "cls", "stop", "special", "image", "audio",
})  # fmt: skip
"""Beside "token": what a tokenizer has, not what a server wants."""
_OF_KEYS = frozenset({
    "api", "access", "private", "signing", "encryption", "ssh", "account", "master", "service",
    "client", "storage", "deploy", "license", "host", "rsa", "gpg", "wandb", "openai",
    "anthropic", "comet", "neptune", "mlflow", "hf", "aws", "azure", "gcp", "google", "github",
    "gitlab",
})  # fmt: skip
_OF_TOKENS = frozenset({"api", "access", "refresh", "bot", "hf", "github", "gitlab"})

_NAME = r"[A-Za-z_][\w.\-]*"
_WHOLE = re.compile(rf"[-+]*(?P<name>{_NAME}):?=")
# A name that begins here, in any quotes or index, and what leads to its value.
_HEAD = re.compile(
    rf"""(?<![\w.\-])(?P<dash>-{{0,2}})(?P<quote>(?:\\{{0,4}}["'])?)(?P<inner>-{{0,2}})(?P<name>{_NAME})
    (?P=quote)\]?(?P<between>[ \t]*(?::=|={{1,3}}|[:,])[ \t]*|[ \t]+)""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\\{0,4}["']?[^\s,;&"'{}()\[\]]+""", re.DOTALL
)
_FLAG = re.compile(rf"-{{1,2}}(?P<name>{_NAME})")
_OPTION = re.compile(r"--?[A-Za-z][\w\-]*(?:=.*)?", re.DOTALL)

_FORMS = (
    # an authorization header
    (re.compile(r"""(?i)((?:proxy-)?authorization["']?\s*[:=]\s*["']?)[^"'\r\n]+"""), r"\1***"),
    (re.compile(r"""(?i)\b(bearer\s+)[^\s"',;]+"""), r"\1***"),
    # user:password@ of a URL; a name alone is a token over HTTP, and only a name over ssh
    (re.compile(r"(?i)([a-z][a-z0-9+.\-]{0,30}://[^\s/?#:@]*:)[^\s/?#]*(?=@)"), r"\1***"),
    (re.compile(r"(?i)(https?://)[^\s/?#:@]+(?=@)"), r"\1***"),
    (re.compile(r"([?&]sig=)[^\s&]+"), r"\1***"),
    (re.compile(r"hooks\.slack\.com/services/\S+"), "hooks.slack.com/services/***"),
    # what well-known services give out, whatever it is called here
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|"
            r"glpat-[\w\-]{16,}|sk-[\w\-]{16,}|xox[a-z]-[\w\-]{8,}|AKIA[0-9A-Z]{16}|"
            r"AIza[\w\-]{30,}|eyJ[\w\-]{8,}\.eyJ[\w\-]{8,}\.[\w\-]*)"
        ),
        REDACTED,
    ),
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*", re.DOTALL), r"\1***"),
)

_ROOTS = (
    "token", "auth", "bearer", "cookie", "session", "jwt", "pass", "pw", "signature", "webhook",
    "secret", "credential", "key", "://", "sig=", "slack.com", "hf_", "glpat", "sk-", "xox",
    "akia", "aiza", "eyj",
)  # fmt: skip
"""Whatever is replaced holds one of these, or one of `_FORM`."""
_FORM = re.compile(r"pat(?![a-z])|gh[a-z]_").search


def redact(value: Value) -> Value:
    """Return a value with every secret in it replaced by ``***``; what holds none stays itself.

    A mapping (an environment, a configuration) loses the values of secret names, at any depth.
    None, True, False and empty values stay. A list or tuple of strings is a command line. Known
    are ``--api-key X``, ``--api-key=X`` and ``NAME=VALUE``, also inside a word (a shell's line,
    code, JSON), and there ``"name": "value"`` and ``name = value``. So are ``user:password@`` of
    URLs, headers, and the forms of well-known services' keys. A string is one such word. A
    password without a name beside it cannot be known. Other values stay as they are.

    >>> redact(["train.py", "--wandb-key", "abc", "--lr=1"])
    ['train.py', '--wandb-key', '***', '--lr=1']
    >>> redact({"lr": 0.1, "hub": {"api_key": "abc"}})
    {'lr': 0.1, 'hub': {'api_key': '***'}}
    """
    found: Any = value
    if isinstance(value, str):
        # Most lines of a training are done after this look, in 2 us instead of 30.
        lower = value.lower().replace("tokens_per_", "")
        if any(map(lower.__contains__, _ROOTS)) or _FORM(lower):
            found = _redact_text(value)
    elif isinstance(value, Mapping):
        found = {name: _redact_named(name, item) for name, item in value.items()}
    elif type(value) in (list, tuple):
        found = type(found)(_redact_words(found))
    return found  # type: ignore[no-any-return]


def _redact_named(name: object, value: object) -> object:
    if not isinstance(name, str) or not _is_secret(name):
        return redact(value)
    if value is None or isinstance(value, bool) or value == "":
        return value
    return REDACTED


def _redact_words(words: Iterable[object]) -> Iterator[object]:
    value_next = False
    for word in words:
        if value_next and isinstance(word, str) and not _OPTION.fullmatch(word):
            yield REDACTED
            value_next = False
            continue
        yield redact(word)
        value_next = isinstance(word, str) and _announces_secret(word)


def _announces_secret(word: str) -> bool:
    """Return whether a secret follows as the next word, as after ``--token``."""
    if word.lower() == "bearer":
        return True
    flag = _FLAG.fullmatch(word)
    return flag is not None and _is_secret(flag["name"], option=True)


def _redact_text(text: str) -> str:
    whole = _WHOLE.match(text)
    while whole is not None:
        end = whole.end()
        if _is_secret(whole["name"], option=text.startswith("-")):
            # All that follows is the value, spaces and quotes as well; nothing is no secret.
            if end == len(text):
                return text
            return text[:end] + REDACTED
        whole = _WHOLE.match(text, end)
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return _redact_pairs(text)


def _redact_pairs(text: str) -> str:
    """Replace the values of all secret names in a text, such as code, JSON or a shell's line."""
    parts: list[str] = []
    end = 0
    while head := _HEAD.search(text, end):
        parts.append(text[end : head.end()])
        end = head.end()
        between = head["between"].strip()
        option = bool(head["dash"] or head["inner"])
        # `--token x` and `"token", "x"` are a name and its value; `token x` and `token, x` not.
        if (not between and not option) or (between == "," and not head["quote"]):
            continue
        if not _is_secret(head["name"], option=option):
            continue
        value = _VALUE.match(text, end)
        if not value or (not between and _OPTION.match(value[0])):
            continue
        quote = value[0][0]
        if quote not in "\"'" or not value[0].endswith(quote):
            quote = ""
        parts.append(f"{quote}{REDACTED}{quote}")
        end = value.end()
    return "".join([*parts, text[end:]])


@lru_cache(4096)
def _is_secret(name: str, *, option: bool = False) -> bool:
    """Return whether a name is a secret's; ``option``: whether it is an option's: ``--key``."""
    words = [word.lower() for word in _WORD.findall(name)]
    joined = "".join(words)
    if any(part in joined for part in _WITHIN):
        return True
    if words == ["pwd"] or (_OF_TEXT & set(words) and {"token", "tokens"} & set(words)):
        return False
    ends = any(word.endswith(_AT_THE_END) and not word.endswith(_HARMLESS) for word in words)
    if ends or not _SECRET_WORDS.isdisjoint(words):
        return True
    if "tokens" in words and not _OF_TOKENS.isdisjoint(words):
        return True
    if not words or words[-1] not in ("key", "keys"):
        return False
    # COMET_KEY is a secret; --image-key of a data loader and sorted(key=...) are not.
    return name.isupper() or not _OF_KEYS.isdisjoint(words) or (option and len(words) == 1)
