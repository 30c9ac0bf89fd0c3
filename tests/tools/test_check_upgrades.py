"""What `check` advises: no upgrade leads back, none counts for what it does not fix, and what it breaks is said."""

from __future__ import annotations

import random

import pytest
from packaging.version import Version

from diffusers_quantfix.advisories.findings import findings, fixing_releases
from diffusers_quantfix.advisories.ranges import alternatives, exact_version, inside, overlap, raised
from diffusers_quantfix.advisories.upgrades import Upgrade, upgrades
from diffusers_quantfix.fixes.targets import TARGETS


def advised(pins: dict[str, str], complete: bool = False) -> dict[str, Upgrade]:
    found = upgrades(pins, findings(pins, complete=complete), complete)
    return {
        " with ".join(f"{name} {version}" for name, version in one.releases.items()): one for one in found
    }


def test_an_older_release_is_no_fix():
    """bnb-cpu-packing is in 0.49.0 and newer: 0.45.3 does not fix it for somebody who takes any release."""
    for pin in ("", ">=0.43", "!=0.45.2", "==0.45.2 || ==0.50.2", ">=0.43,<0.44 || >=0.49"):
        for upgrade in advised({"bitsandbytes": pin}).values():
            assert "bnb-cpu-packing" not in upgrade.fixes, (pin, str(upgrade))
    assert not advised({"bitsandbytes": "==0.50.2"})
    assert "bnb-cpu-packing" not in advised({"bitsandbytes": "==0.49.0"})["bitsandbytes 0.50.0"].fixes


def test_a_range_is_told_the_least_release():
    either = advised({"bitsandbytes": ">=0.44"})["bitsandbytes 0.45.3"]
    assert str(either).startswith("bitsandbytes 0.45.3 or newer fixes ")
    assert either.fixes == ["bnb-current-device", "bnb-int8-saved-tiles", "bnb-quant-state-code"]
    assert either.brings == []
    # what a range keeps out, it keeps out: 0.45.3 is not in it, so that the advice is that one release
    other = advised({"bitsandbytes": ">=0.44,<0.45"})["bitsandbytes 0.45.3"]
    assert str(other).startswith("bitsandbytes 0.45.3 fixes ")


@pytest.mark.parametrize(
    ("pin", "version", "then"),
    [
        ("==1.0", "1.5", "==1.5"),
        ("==2.0", "1.5", "==2.0"),
        ("", "1.5", ">=1.5"),
        (">=1,<2", "1.5", ">=1,<2,>=1.5"),
        (">=1,<1.5", "1.5", "==1.5"),
        ("~=1.2.0", "1.5", "==1.5"),
        ("==1.*", "1.5", "==1.*,>=1.5"),
        ("==1.0 || ==2.0", "1.5", "==1.5 || ==2.0"),
        ("==1.0 || >=1.2", "1.5", "==1.5 || >=1.2,>=1.5"),
    ],
)
def test_the_pin_after_an_upgrade(pin, version, then):
    assert raised(pin, version) == then


def test_releases_that_then_do_not_fit_together():
    pins = {"diffusers": "==0.36.0", "bitsandbytes": "==0.45.5", "transformers": "==4.44.2"}
    both = advised(pins)["diffusers 0.37.0 with bitsandbytes 0.48.1"]
    assert any("use transformers 4.48 or newer" in sentence for sentence in both.conflicts)
    assert "; but diffusers 0.37.0, transformers 4.44.2: diffusers cannot be imported" in str(both)
    # a combination that is there before is no news: both of these need a newer libstdc++
    assert advised({"bitsandbytes": "==0.45.2"})["bitsandbytes 0.45.3"].conflicts == []


def test_a_library_that_others_bring_along_does_not_bring_its_own_defects():
    pins = {"diffusers": "==0.37.0", "bitsandbytes": "==0.48.1"}
    for upgrade in advised(pins).values():
        assert not [one for one in upgrade.brings if one.startswith("transformers-")], str(upgrade)


def test_a_lock_without_a_library_is_not_told_to_upgrade_it():
    pins = {"diffusers": "==0.37.0", "bitsandbytes": "==0.45.5"}
    assert not [one for one in advised(pins, complete=True) if "transformers" in one]


def test_extras_that_contradict_each_other():
    """One extra with an old release, one with a new: the old one is upgraded, the new one stays."""
    upgrade = advised({"bitsandbytes": "==0.45.2 || ==0.50.2"})["bitsandbytes 0.48.1"]
    assert "bnb-quant-state-code" in upgrade.fixes and not upgrade.or_newer
    assert "bnb-param-kwargs" not in upgrade.fixes, "0.48.1 has it"


LIBRARIES = {
    "bitsandbytes": ("0.43.0", "0.44.1", "0.45.2", "0.47.0", "0.48.0", "0.49.0", "0.50.2"),
    "diffusers": ("0.31.0", "0.33.1", "0.34.0", "0.36.0", "0.37.0", "0.42.1"),
    "transformers": ("4.44.2", "4.53.3", "4.57.0", "5.0.0", "5.23.0"),
    "accelerate": ("0.34.2", "1.6.0", "1.12.0", "1.15.0"),
    "optimum-quanto": ("0.2.5", "0.2.6", "0.2.7"),
}
SHAPES = ("=={0}", ">={0}", "<={1}", ">={0},<{1}", "=={0} || =={1}", "~={0}", "", ">={0},!={1}")


def drawn(random_: random.Random) -> dict[str, str]:
    pins = {}
    for name in random_.sample(list(LIBRARIES), random_.randint(1, len(LIBRARIES))):
        low, high = sorted(random_.sample(LIBRARIES[name], 2), key=Version)
        pins[name] = random_.choice(SHAPES).format(low, high)
    return pins


@pytest.mark.parametrize("seed", range(60))
def test_no_upgrade_names_a_release_below_one_that_is_affected(seed):
    random_ = random.Random(seed)
    pins = drawn(random_)
    complete = random_.random() < 0.5
    claims = {name: target.claims for name, target in TARGETS.items()}
    fixed_in = {name: fixing_releases(target) for name, target in TARGETS.items()}
    for upgrade in advised(pins, complete).values():
        assert upgrade.fixes
        assert not set(upgrade.fixes) & set(upgrade.brings)
        for name, version in upgrade.releases.items():
            for pin in alternatives(pins.get(name, "")):
                exact = exact_version(pin)
                newest = len(alternatives(pins.get(name, ""))) == 1 and exact is not None
                assert not newest or Version(version) > Version(exact or "0"), (
                    f"a downgrade of {name}: {upgrade}"
                )
        for fix_id in upgrade.fixes:
            # Above the upgrade nothing that the pins allow is affected, or it is what the release notes say fixes it.
            above = [
                name
                for name, version in upgrade.releases.items()
                if name in claims[fix_id]
                and not any(
                    overlap(claims[fix_id][name], spec)
                    for spec in alternatives(raised(pins.get(name, ""), version))
                )
            ]
            fixed = fixed_in[fix_id] and all(
                inside(f">={version}", raised(pins.get(name, ""), upgrade.releases.get(name, "0"))) == "yes"
                for name, version in fixed_in[fix_id].items()
            )
            assert above or fixed, f"{upgrade}: {fix_id}"
