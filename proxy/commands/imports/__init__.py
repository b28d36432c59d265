"""Settings files of other gateways, read for `import`: one module per gateway, on the documents and results that they share."""
