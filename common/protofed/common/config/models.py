"""Names of the models that `client.models.catalogue` registers, for processes without torch."""

MODELS = ("conv2cifar", "digits-cnn", "fedavg-cnn", "mlp", "resnet18", "resnet50", "simple-cnn")
