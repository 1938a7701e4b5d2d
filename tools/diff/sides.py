"""The two policies of a comparison, each resolved."""

from dataclasses import dataclass

from fxamp.devices import DEVICES
from fxamp.errors import OptionError, PolicyError, nearest
from fxamp.policy import Policy
from fxamp.policy.model.comparisons import holds, installed_torch_version


@dataclass(frozen=True)
class Side:
    """A resolved policy, and the name or path that it was loaded by."""

    policy: Policy
    source: str

    @property
    def about(self) -> str:
        """Return one line about the policy: its name, its file, and what it is for."""
        policy = self.policy
        file = f" ({self.source})" if self.source != policy.name else ""
        return f"{policy.name}{file}, for {policy.device} in {policy.lower_precision_fp}"


def load_side(source: str, device: str | None, torch_version: str | None) -> Side:
    """Load the policy of a built-in name or a path, and resolve it for a device and a version of torch.

    Raises PolicyError with every mistake of its files, or if it is not for that device or version; OptionError for a
    device that no policy supports.
    """
    kind = None if device is None else device.partition(":")[0]
    if kind is not None and kind not in DEVICES:
        hint = nearest(kind, DEVICES)
        raise OptionError(f"--device {device!r} is unknown{hint}; accepted: {', '.join(DEVICES)}")
    try:
        policy = Policy.load(source)
    except OSError as error:
        raise PolicyError(f"{source}: {error.strerror}") from error
    try:
        version = torch_version or installed_torch_version()
    except PolicyError as error:
        raise PolicyError("torch is not installed; --torch V sets the version to compare for") from error
    if torch_version is None and policy.torch and not holds(policy.torch, version):
        needs = f"policy {policy.name!r} needs torch {policy.torch}, but torch {version} is installed"
        raise PolicyError(f"{needs}; --torch V compares for another version")
    return Side(policy.resolve(device, version), source)
