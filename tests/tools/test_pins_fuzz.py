"""`check` on ten thousand broken inputs: real files, mutated.  Each is read or refused in a sentence."""

from __future__ import annotations

import argparse
import pathlib
import random
import re
import time

import pytest

from diffusers_quantfix.advisories.pins import Reading, UnreadableInput, read
from diffusers_quantfix.commands import check
from tests.marks import rest_is_long

FOLDER = pathlib.Path(__file__).with_name("pin_files")
FILES = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}

TOKENS = [
    *(b"\0", b"\r", b"\n", b"\t", b"\x0b", b"\x1b[31m", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(b"[", b"]", b"{", b"}", b"[[", b"]]", b'"', b"'", b'"""', b"'''", b"=", b",", b".", b"#", b" #", b"\\", b"\\\n"),
    *(b"[" * 3000, b"{a=" * 1500, b"(" * 3000, b"a." * 300, b"1" * 5000, b" " * 5000, b"'" * 999, b"-" * 999),
    *(b"==", b"===", b"===x", b"~=", b">=1", b"<", b"!=", b"||", b"^", b"~", b"*", b"1!", b"+local", b".post1"),
    *(b"bitsandbytes", b"diffusers==0.33.1", b"torch", b"\nname = 3\n", b"\nversion = []\n", b".dev0"),
    *(b"; python_version < '3'", b"; extra == 'x'", b"; 'x' in extras", b" ; (((", b"marker = 1\n", b"markers = [1]\n"),
    *(b"-r ", b"-c ", b"-e ", b"-r .\n", b"-r /dev/zero\n", b"-c ../../../etc/passwd\n", b"--hash=", b"${QF_SECRET}"),
    *(b" @ ", b"https://", b"file://", b".whl", b"-1-py3-none-any.whl", b"#egg=", b".tar.gz", b"%", b"::error::"),
    *(b"\n[project]\n", b"\n[[package]]\n", b"\n[tool.poetry]\n", b"\ndynamic = 1\n", b"\n[dependency-groups]\n"),
    *("é\u2028".encode(), b"\ndependencies = 1\n", b"a\\u0000b"),
]  # fmt: skip
WORDS = [token for token in TOKENS if not set(token) & set(b"\n\r\0\"'\\#") and token.isascii()]


def mutated(random_: random.Random, data: bytes) -> bytes:
    """One to three changes."""
    for _ in range(random_.randint(1, 3)):
        place = random_.randrange(len(data) + 1)
        length = random_.choice((1, 1, 3, 20, 200))
        kind = random_.randrange(12)
        if kind >= 9:  # the text inside a pair of quotes, or a word: what is around it stays valid
            found = random_.choice(
                [None, *re.finditer(rb'(?<=")[^"\n]*(?=")|(?<==)[0-9.]+|[\w-]+(?==)', data)]
            )
            if found is not None:
                words = b"".join(random_.choices(WORDS, k=random_.randint(1, 3)))
                data = data[: found.start()] + words + data[found.end() :]
        elif kind <= 2:
            data = data[:place] + random_.choice(TOKENS) + data[place:]
        elif kind in (3, 4):
            data = data[:place] + data[place + length :]
        elif kind == 5:
            data = data[:place] + random_.randbytes(random_.choice((1, 2, 8))) + data[place + 1 :]
        elif kind == 6:
            piece = random_.choice(list(FILES.values()))
            start = random_.randrange(len(piece))
            data = data[:place] + piece[start : start + length] + data[place:]
        elif kind == 7:
            lines = data.split(b"\n")
            random_.shuffle(lines)
            data = b"\n".join(lines)
        else:
            data = data[: max(place, 1)]
    if random_.random() < 0.03:
        encoding = random_.choice(("utf-16", "utf-32", "utf-8-sig"))
        data = data.decode("utf-8", "replace").encode(encoding, "replace")
    return data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QF_SECRET", "hunter2")
    (tmp_path / ".git").mkdir()
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def options(*files: pathlib.Path, **more: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    parsed = parser.parse_args([*map(str, files)])
    for name, value in more.items():
        setattr(parsed, name, value)
    return parsed


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.long
def test_what_is_read_or_refused(folder, seed):
    """A thousand inputs each: nothing but `UnreadableInput` comes out of the readers, and that in a clean sentence."""
    random_ = random.Random(seed)
    refused = 0
    for number in range(1000):
        name = random_.choice(list(FILES))
        file = folder / name
        data = mutated(random_, FILES[name])
        file.write_bytes(data)
        reading = Reading()
        started = time.process_time()
        try:
            read([str(file)], reading)
            _ = reading.pins
            said = reading.notes
        except UnreadableInput as error:
            refused += 1
            said = [str(error)]
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {number}, {name}: {data!r}") from error
        assert time.process_time() - started < 5
        for sentence in said:
            assert sentence.isprintable() and len(sentence) < 600 and "hunter2" not in sentence
        file.write_bytes(FILES[name])
    assert 300 < refused < 850, "the inputs are neither all broken nor all whole"


@pytest.mark.parametrize("seed", rest_is_long(range(100, 110), 100, 101, 102))
def test_what_the_command_says(folder, seed, capsys):
    """A hundred inputs each, through all of the command: one of three exit codes, and only 2 says nothing on stdout."""
    random_ = random.Random(seed)
    for _ in range(100):
        name = random_.choice(list(FILES))
        file = folder / name
        file.write_bytes(mutated(random_, FILES[name]))
        kind = random_.choice(("text", "json", "github", "sarif"))
        code = check.run(options(file, format=kind))
        said = capsys.readouterr()
        assert code in (0, 1, 2)
        assert (code == 2) == bool(said.err)
        assert "cannot be read: " not in said.err or "Error" not in said.err, "the last resort is not needed"
        assert "hunter2" not in said.out + said.err
        assert "\x1b" not in said.out + said.err
        file.write_bytes(FILES[name])


def test_the_files_themselves_are_read(folder):
    for name in FILES:
        if name != "limits.txt":
            assert "==0.45" in read([str(folder / name)]).pins["bitsandbytes"], name
