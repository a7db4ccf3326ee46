"""``ModuleValidator`` with Opacus's names: find and replace modules that can't be trained privately."""

from __future__ import annotations

from typing import Any, final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpvision.errors import PrivacyError
from dpvision.gradients.separability import unfit_parts
from dpvision.models.private_ready import make_private_ready


class UnsupportedModuleError(PrivacyError):
    """A module that can't be trained privately."""


@final
class ModuleValidator:
    """Look at the modules of a model. What it computes is proved later, in the first step."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """Return what is wrong with the modules of a model.

        Args:
            module: the model.
            strict: whether to raise the first problem, if there is one.

        Raises:
            UnsupportedModuleError: there is a problem, with ``strict``.
        """
        found = [UnsupportedModuleError(str(finding)) for finding in unfit_parts(module)]
        for name, part in module.named_modules():
            if isinstance(part, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
                found.append(
                    UnsupportedModuleError(
                        f"{name or 'the model'} is a {type(part).__name__}, which divides rows over devices. Give "
                        "make_private the module inside of it (model.module)."
                    )
                )
            elif isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
                found.append(UnsupportedModuleError(_mixing(name, part, "mixes the rows of a batch")))
            elif isinstance(part, _InstanceNorm) and part.training and part.track_running_stats:
                found.append(UnsupportedModuleError(_mixing(name, part, "keeps statistics of private rows")))
        if strict and found:
            raise found[0]
        return found

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Return whether ``validate`` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        """Return a copy in which BatchNorm is GroupNorm and no module writes in place or keeps statistics.

        Args:
            module: the model; it stays as it is.
            options: of ``dpvision.models.make_private_ready``, such as ``groups``.
        """
        return make_private_ready(module, **options)[0]

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """Return ``fix`` of a model.

        Raises:
            UnsupportedModuleError: a problem remains.
        """
        fixed = cls.fix(module, **options)
        cls.validate(fixed, strict=True)
        return fixed


def _mixing(name: str, part: nn.Module, how: str) -> str:
    return f"{name or 'the model'} ({type(part).__name__}) {how}. Replace it: ModuleValidator.fix(model)."
