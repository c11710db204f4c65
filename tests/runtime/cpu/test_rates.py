"""The CPU as a device: its rates and caches, with fixed measurements."""

import pytest

from onchip.runtime.cpu import backend as cpu


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """Measured flop/s; cached in a temporary folder."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    found = [1e9]
    monkeypatch.setattr(cpu, "measure_flops", lambda: found[0])
    monkeypatch.setattr(cpu, "measure_bandwidth", lambda cores: 1e9)
    return found


def test_the_better_rates_are_kept(rates):
    assert cpu.this_cpu().flops["fp32"] == 1e9
    rates[0] = 3e9
    assert cpu.this_cpu().flops["fp32"] == 1e9  # not measured again
    assert cpu.this_cpu(measure=True).flops["fp32"] == 3e9
    rates[0] = 2e9  # under other load
    assert cpu.this_cpu(measure=True).flops["fp32"] == cpu.this_cpu().flops["fp32"] == 3e9


@pytest.mark.parametrize(("reported", "cores", "taken"), [(300, 2, 24), (36, 2, 24), (8, 2, 8), (384, 96, 384)])
def test_the_last_cache_is_no_more_than_its_cores_share(monkeypatch, rates, reported, cores, taken):
    """A virtual machine reports the whole L3 of its host."""
    monkeypatch.setattr(cpu, "cache_bytes", lambda level: reported << 20)
    monkeypatch.setattr(cpu, "core_count", lambda: cores)
    assert cpu.this_cpu().cache_bytes == taken << 20


def test_without_an_l3_it_is_the_l2_of_all_cores(monkeypatch, rates):
    def no_l3(level):
        if level == 3:
            raise OSError
        return 1 << 20

    monkeypatch.setattr(cpu, "cache_bytes", no_l3)
    monkeypatch.setattr(cpu, "core_count", lambda: 4)
    assert cpu.this_cpu().cache_bytes == 4 << 20
