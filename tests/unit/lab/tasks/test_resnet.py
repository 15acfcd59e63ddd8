"""The networks are those of the paper, and their checkpoints are torchvision's."""

import importlib.util

import pytest
import torch
from torch import nn

from gossipdp.parallel.schedule import parameter_groups
from gossipdp_lab.tasks.resnet import CIFAR_RESNET18_PARAMETERS, ResNet, cifar_resnet18, resnet50


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_parameter_counts():
    assert num_parameters(cifar_resnet18()) == CIFAR_RESNET18_PARAMETERS == 11_173_962
    with torch.device("meta"):
        assert num_parameters(resnet50()) == 25_557_032


def test_the_stem_for_small_images_keeps_their_size():
    net = cifar_resnet18()
    sizes = []
    for layer in (net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4):
        layer.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    with torch.device("meta"):
        net.to("meta")(torch.zeros(1, 3, 32, 32))
    assert sizes == [(64, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_resnet50_halves_in_the_3_by_3_convolutions():
    with torch.device("meta"):
        net = resnet50()
        assert net(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    first = net.layer2[0]
    assert (first.conv1.stride, first.conv2.stride, first.conv3.stride) == ((1, 1), (2, 2), (1, 1))


@pytest.mark.parametrize(("bottleneck", "channels"), [(False, 64), (True, 256)])
def test_a_block_starts_as_its_shortcut(bottleneck, channels):
    net = ResNet((2,), 2, stem=nn.Conv2d(3, 64, 3, padding=1), bottleneck=bottleneck)
    block = net.layer1[1]
    images = torch.rand(2, channels, 8, 8)
    assert torch.equal(block(images), images)


def test_weight_decay_is_not_on_norms_and_biases():
    net = cifar_resnet18()
    decayed, others = parameter_groups(net, 5e-4)
    assert (decayed["weight_decay"], others["weight_decay"]) == (5e-4, 0.0)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    bare = [parameter for norm in norms for parameter in norm.parameters()]
    assert {id(each) for each in others["params"]} == {id(each) for each in (*bare, net.fc.bias)}


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
def test_a_whole_step_of_resnet50_is_torchvision_s():
    import torchvision

    torch.manual_seed(0)
    theirs = torchvision.models.resnet50()
    ours: ResNet = resnet50()
    ours.load_state_dict(theirs.state_dict())
    images, labels = torch.randn(4, 3, 96, 96), torch.randint(1000, (4,))
    for net in (ours, theirs):
        optimizer = torch.optim.SGD(parameter_groups(net, 5e-4), lr=0.1, momentum=0.9)
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)
