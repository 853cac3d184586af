//! What happens in a daemon, told to those who subscribed on its control socket, a line for each event.
//!
//! Nobody waits for a subscriber: one whose socket is full is disconnected, so that he knows that he missed something.

use std::io::Write;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;
use rustix::net::RecvFlags;
use serde::Serialize;
use serde_json::json;

/// Subscribers at a time.
const MAX_SUBSCRIBERS: usize = 8;

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event {
    /// A device is served now.
    DeviceAdded {
        /// Which.
        device: String,
        /// Of which network.
        network: String,
    },
    /// A device is gone.
    DeviceRemoved {
        /// Which.
        device: String,
        /// Of which network.
        network: String,
    },
    /// The link of a device went up or down.
    Link {
        /// Of which.
        device: String,
        /// `up` or `down`.
        state: String,
    },
    /// The interface of an uplink changed, and the links of the network's devices follow it.
    Carrier {
        /// Of which network.
        network: String,
        /// Which interface.
        interface: String,
        /// `up`, `down`, `no carrier` or `absent`.
        state: String,
        /// Bytes of an IP packet that it carries; none while it is absent.
        mtu: Option<u32>,
    },
    /// A VMM connected to a device, or is gone.
    Client {
        /// Which device.
        device: String,
        /// Of which network.
        network: String,
        /// It is there.
        connected: bool,
    },
    /// A queue pair went to its error state, not by its guest. Not more often than the log says so.
    QueuePairFailed {
        /// Of which device.
        device: String,
        /// Of which network.
        network: String,
        /// Its number.
        qpn: u32,
        /// Address of its peer.
        peer: IpAddr,
        /// Who ended it and what happened before, in words.
        history: String,
    },
    /// A host beyond the uplink uses an address of a device.
    AddressConflict {
        /// Of which device.
        device: String,
        /// Of which network.
        network: String,
        /// Which address.
        address: IpAddr,
        /// Its VLAN.
        vlan: Option<u16>,
        /// The device keeps it, because it is listed or the rule is `any`. Otherwise its claim has ended.
        kept: bool,
    },
    /// The process of a network ended, and the next one starts.
    NetworkEnded {
        /// Which network.
        network: String,
        /// How it ended.
        how: String,
        /// Devices that it took from their VM.
        lost_vms: Vec<String>,
    },
    /// A process of a network was killed and does not end. The next one starts all the same.
    ProcessWedged {
        /// Of which network.
        network: String,
        /// Its number.
        pid: u32,
    },
    /// Such a process has ended.
    ProcessGone {
        /// Of which network.
        network: String,
        /// Its number.
        pid: u32,
    },
}

impl Event {
    /// Kinds of events.
    pub(crate) const NAMES: [&str; 10] = [
        "device-added",
        "device-removed",
        "link",
        "carrier",
        "client",
        "queue-pair-failed",
        "address-conflict",
        "network-ended",
        "process-wedged",
        "process-gone",
    ];
}

/// Those who want to know.
#[derive(Debug, Default)]
pub(crate) struct Events {
    subscribers: Mutex<Vec<Subscriber>>,
}

#[derive(Debug)]
struct Subscriber {
    stream: UnixStream,
    json_rpc: bool,
}

impl Subscriber {
    /// Returns `true` if it is still there. What it says now is no request any more.
    fn is_there(&self) -> bool {
        let mut byte = [0; 1];
        !matches!(rustix::net::recv(&self.stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT), Ok((0, _)))
    }

    fn tell(&mut self, event: &Event) -> bool {
        let text = match self.json_rpc {
            true => serde_json::to_vec(&json!({"jsonrpc": "2.0", "method": "event", "params": event})),
            false => serde_json::to_vec(event),
        };
        text.is_ok_and(|text| self.write([text.as_slice(), b"\n"].concat().as_slice()))
    }

    /// Returns `true` if all of it was taken at once.
    fn write(&mut self, line: &[u8]) -> bool {
        self.stream.write(line).is_ok_and(|count| count == line.len())
    }
}

impl Events {
    /// Tells this connection all that happens behind its `answer`, until it is closed.
    ///
    /// # Errors
    /// There are enough already: the connection is given back.
    pub(crate) fn subscribe(&self, stream: UnixStream, answer: &[u8], json_rpc: bool) -> Result<(), UnixStream> {
        let mut subscribers = self.subscribers.lock();
        subscribers.retain(Subscriber::is_there);
        if subscribers.len() >= MAX_SUBSCRIBERS {
            return Err(stream);
        }
        if stream.set_nonblocking(true).is_ok() {
            let mut subscriber = Subscriber { stream, json_rpc };
            if subscriber.write(answer) {
                subscribers.push(subscriber);
            }
        }
        Ok(())
    }

    /// Something happened.
    pub(crate) fn tell(&self, event: &Event) {
        self.subscribers.lock().retain_mut(|subscriber| subscriber.tell(event));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};

    use super::*;

    fn link(device: &str) -> Event {
        Event::Link { device: device.to_owned(), state: "down".to_owned() }
    }

    #[test]
    fn subscribers_are_told_in_order() {
        let events = Events::default();
        let [(plain, a), (rpc, b)] = [UnixStream::pair().unwrap(), UnixStream::pair().unwrap()];
        events.tell(&link("before"));
        events.subscribe(a, b"{}\n", false).unwrap();
        events.subscribe(b, b"{}\n", true).unwrap();
        events.tell(&link("vm0"));
        drop(events);
        let lines = |stream| BufReader::new(stream).lines().map(Result::unwrap).collect::<Vec<_>>();
        assert_eq!(lines(plain), ["{}", r#"{"event":"link","device":"vm0","state":"down"}"#]);
        let wrapped = r#"{"jsonrpc":"2.0","method":"event","params":{"device":"vm0","event":"link","state":"down"}}"#;
        assert_eq!(lines(rpc), ["{}", wrapped]);
    }

    /// The attack: who subscribes and does not read. He is disconnected, and nobody has waited.
    #[test]
    fn sec_e1_who_does_not_read_is_disconnected() {
        let events = Events::default();
        let (mut slow, a) = UnixStream::pair().unwrap();
        events.subscribe(a, b"", false).unwrap();
        let event = link(&"x".repeat(1000));
        let mut told = 0;
        while !events.subscribers.lock().is_empty() {
            events.tell(&event);
            told += 1;
            assert!(told < 100_000, "a socket holds less");
        }
        let mut text = Vec::new();
        slow.read_to_end(&mut text).unwrap();
        assert!(text.len() > 1000);
    }

    /// The attack: more subscribers than there may be. Those who left make room.
    #[test]
    fn sec_e2_there_are_so_many_subscribers() {
        let events = Events::default();
        let mut held = Vec::new();
        for _ in 0..MAX_SUBSCRIBERS {
            let (mine, theirs) = UnixStream::pair().unwrap();
            events.subscribe(theirs, b"", false).unwrap();
            held.push(mine);
        }
        let (_mine, theirs) = UnixStream::pair().unwrap();
        let given_back = events.subscribe(theirs, b"", false).unwrap_err();
        held.pop();
        events.subscribe(given_back, b"", false).unwrap();
    }

    #[test]
    fn all_kinds_have_their_names() {
        let text = || "x".to_owned();
        let all = [
            Event::DeviceAdded { device: text(), network: text() },
            Event::DeviceRemoved { device: text(), network: text() },
            link("x"),
            Event::Carrier { network: text(), interface: text(), state: text(), mtu: Some(1500) },
            Event::Client { device: text(), network: text(), connected: true },
            Event::QueuePairFailed {
                device: text(),
                network: text(),
                qpn: 1,
                peer: IpAddr::from([10, 0, 0, 1]),
                history: text(),
            },
            Event::AddressConflict {
                device: text(),
                network: text(),
                address: IpAddr::from([10, 0, 0, 1]),
                vlan: None,
                kept: true,
            },
            Event::NetworkEnded { network: text(), how: text(), lost_vms: vec![] },
            Event::ProcessWedged { network: text(), pid: 1 },
            Event::ProcessGone { network: text(), pid: 1 },
        ];
        let names = all.map(|event| serde_json::to_value(event).unwrap()["event"].as_str().unwrap().to_owned());
        assert_eq!(names, Event::NAMES);
    }
}
