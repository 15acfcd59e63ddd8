"""The networks are those of the paper, and their checkpoints are torchvision's."""

import importlib.util

import pytest
import torch
from torch import nn

from gossipdp.parallel.schedule import parameter_groups
from gossipdp_lab.tasks.resnet import (
    CIFAR_RESNET18_PARAMETERS,
    ResNet,
    cifar_resnet18,
    fashion_resnet8,
    resnet50,
)


@pytest.mark.parametrize(
    ("make", "image", "num_parameters", "sizes"),  # channels and height: of the stem, of each layer
    [
        (cifar_resnet18, (3, 32, 32), CIFAR_RESNET18_PARAMETERS,
         [(64, 32), (64, 32), (128, 16), (256, 8), (512, 4)]),
        (fashion_resnet8, (1, 28, 28), 77_754, [(16, 14), (16, 14), (32, 7), (64, 4)]),
        (resnet50, (3, 224, 224), 25_557_032,
         [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]),
    ],
)  # fmt: skip
def test_the_size_of_a_network_and_of_what_its_parts_give(make, image, num_parameters, sizes):
    found = []
    with torch.device("meta"):
        net = make()
        layers = [net.get_submodule(f"layer{number}") for number in range(1, net.num_layers + 1)]
        for part in (net.conv1, *layers):
            part.register_forward_hook(lambda _, __, out: found.append(tuple(out.shape[1:3])))
        net(torch.zeros(1, *image))
    assert sum(each.numel() for each in net.parameters()) == num_parameters
    assert found == sizes


def test_resnet50_halves_in_the_3_by_3_convolutions():
    with torch.device("meta"):
        first = resnet50().layer2[0]
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
