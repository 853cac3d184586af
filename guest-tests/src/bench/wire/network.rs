//! A pair of interfaces between two network namespaces, with a processor for each side.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;

use crate::namespaces::Namespaces;

/// The IP MTU of the interfaces.
pub(super) const MTU: u32 = 9000;

/// The network, removed on drop.
#[derive(Debug)]
pub(super) struct Network {
    namespaces: Namespaces,
}

impl Network {
    /// Creates it, with interfaces that are up and have addresses of their own ([`Network::host_address`]).
    pub(super) fn new() -> Result<Self> {
        let addresses = [0, 1].map(|side| IpAddr::V4(Self::host_address(side)));
        Ok(Self { namespaces: Namespaces::new("bench", MTU, addresses)? })
    }

    /// Creates the network with a line of 100 Mb/s, whose queue drops everything beyond 60 KB.
    pub(super) fn slow() -> Result<Self> {
        const LINE: &str = "rate 100mbit burst 32kb limit 60kb";
        let addresses = [0, 1].map(|side| IpAddr::V4(Self::host_address(side)));
        let slow = Self { namespaces: Namespaces::behind_filter("slow", MTU, addresses, LINE)? };
        // The queue would drop super-frames as a whole.
        slow.namespaces.limit_super_frames(MTU + 100, 1)?;
        Ok(slow)
    }

    /// Returns the address of the host's own network stack on a side.
    pub(super) fn host_address(side: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 78, 0, side + 1)
    }

    /// Measures while the interfaces accept no super-frames: the kernel segments them before.
    pub(super) fn without_super_frames<T>(&self, measure: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        const DEFAULT: (u32, u32) = (65_536, 65_535);
        self.namespaces.limit_super_frames(MTU + 100, 1)?;
        let measured = measure(self);
        self.namespaces.limit_super_frames(DEFAULT.0, DEFAULT.1)?;
        measured
    }

    /// Returns a command prefix that runs a program on one side, on a processor of its own.
    pub(super) fn enter(&self, side: usize) -> Vec<String> {
        let cpu = side % std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let name = self.namespaces.name(side);
        ["taskset", "--cpu-list", &cpu.to_string(), "ip", "netns", "exec", name].map(str::to_owned).into()
    }
}
