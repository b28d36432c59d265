"""Tests of webhook deliveries and mails."""
