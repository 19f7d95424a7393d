"""Ports for the servers of tests."""

from services.common.rpc.free_ports import free_address as free_address
from services.common.rpc.free_ports import free_port as free_port
