//! Events of a daemon, sent to subscribers on its control socket, one line each. The last events can be read later.
//!
//! No thread waits for a subscriber. A subscriber whose socket is full is disconnected, which tells it that it has
//! missed events.

use std::collections::VecDeque;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;

use jiff::Timestamp;
use parking_lot::Mutex;
use pvrdma_rxe::FailureCause;
use rustix::net::RecvFlags;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

/// Most subscribers.
const MAX_SUBSCRIBERS: usize = 8;

/// Most events that are kept: the last ones.
const MAX_KEPT: usize = 1000;

/// Most bytes of text of these events.
const MAX_KEPT_BYTES: usize = 512 << 10;

/// An event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Event {
    /// A device was added.
    DeviceAdded {
        /// Its name.
        device: String,
        /// Its network.
        network: String,
    },
    /// A device was removed.
    DeviceRemoved {
        /// Its name.
        device: String,
        /// Its network.
        network: String,
    },
    /// The link of a device went up or down.
    Link {
        /// Name of the device.
        device: String,
        /// `up` or `down`.
        state: String,
    },
    /// The interface of an uplink changed, and the links of the network's devices follow it.
    Carrier {
        /// Name of the network.
        network: String,
        /// Name of the interface.
        interface: String,
        /// `up`, `down`, `no carrier` or `absent`.
        state: String,
        /// Longest IP packet that the interface carries, in bytes. `None` while it is absent.
        mtu: Option<u32>,
    },
    /// The other interface of an uplink with two carries its frames from now on.
    Failover {
        /// Name of the network.
        network: String,
        /// Name of the interface that is active now.
        interface: String,
    },
    /// A VMM connected to a device or disconnected.
    Client {
        /// Name of the device.
        device: String,
        /// Its network.
        network: String,
        /// It is connected.
        connected: bool,
    },
    /// The process of a network has crashed, and the next one serves the VMM of a device. The device is in reset until
    /// the guest reloads its driver.
    ClientRecovered {
        /// Name of the device.
        device: String,
        /// Its network.
        network: String,
        /// It is the VMM of the network function beside the device.
        network_function: bool,
        /// Reason why the driver was not told that its device has failed. `None`: it was, or none was active.
        problem: Option<String>,
    },
    /// A queue pair entered the error state without a request of its guest. The rate of these events is limited like
    /// that of the log.
    QueuePairFailed {
        /// Name of the device.
        device: String,
        /// Its network.
        network: String,
        /// Number of the queue pair.
        qpn: u32,
        /// Address of its peer.
        peer: IpAddr,
        /// Cause.
        cause: FailureCause,
        /// The half that failed and preceding events, as text.
        history: String,
        /// Page and section of the documents about the cause.
        help: String,
    },
    /// A host beyond the uplink uses an address of a device.
    AddressConflict {
        /// Name of the device.
        device: String,
        /// Its network.
        network: String,
        /// The address.
        address: IpAddr,
        /// Its VLAN.
        vlan: Option<u16>,
        /// The device keeps the address, because it is listed or the rule is `any`. Otherwise the device has lost it.
        kept: bool,
    },
    /// The process of a network ended, and is replaced.
    NetworkEnded {
        /// Name of the network.
        network: String,
        /// Reason of the end.
        how: String,
        /// Devices that lost their VM by this.
        lost_vms: Vec<String>,
    },
    /// A new process serves a network, with all its clients.
    NetworkHandedOver {
        /// Name of the network.
        network: String,
        /// Time in milliseconds during which its guests were not served.
        millis: u64,
    },
    /// A process of a network was killed but does not end. It is replaced nevertheless.
    ProcessWedged {
        /// Name of the network.
        network: String,
        /// Its process ID.
        pid: u32,
    },
    /// Such a process has ended.
    ProcessGone {
        /// Name of the network.
        network: String,
        /// Its process ID.
        pid: u32,
    },
}

impl Event {
    /// Kinds of events.
    pub(crate) const NAMES: [&str; 13] = [
        "device-added",
        "device-removed",
        "link",
        "carrier",
        "failover",
        "client",
        "client-recovered",
        "queue-pair-failed",
        "address-conflict",
        "network-ended",
        "network-handed-over",
        "process-wedged",
        "process-gone",
    ];
}

/// An event with its time and number.
#[derive(Serialize)]
struct Numbered<'a> {
    #[serde(flatten)]
    event: &'a Event,
    /// UTC, as RFC 3339 has it.
    time: String,
    /// Counts the events since the start of the daemon, so that a reader can find missing ones.
    number: u64,
}

/// An event as a notification of JSON-RPC.
#[derive(Serialize)]
struct Notification<'a> {
    jsonrpc: &'static str,
    method: &'static str,
    params: &'a RawValue,
}

/// All subscribers, and the last events.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    subscribers: Vec<Subscriber>,
    past: VecDeque<(Timestamp, Box<RawValue>)>,
    /// Bytes of text in `past`.
    bytes: usize,
    /// Number of the last event.
    number: u64,
}

#[derive(Debug)]
struct Subscriber {
    stream: UnixStream,
}

impl Subscriber {
    /// Returns `true` if the subscriber is still connected. Data that it sends is ignored.
    fn is_there(&self) -> bool {
        let mut byte = [0; 1];
        !matches!(rustix::net::recv(&self.stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT), Ok((0, _)))
    }

    /// Writes a line without blocking. Returns `true` if all of it was accepted.
    fn write(&mut self, line: &[u8]) -> bool {
        self.stream.write(line).is_ok_and(|count| count == line.len())
    }
}

impl Events {
    /// Sends all events after `answer` to this connection, until it is closed.
    ///
    /// # Errors
    /// There are too many subscribers: the connection is returned.
    pub(crate) fn subscribe(&self, stream: UnixStream, answer: &[u8]) -> Result<(), UnixStream> {
        let subscribers = &mut self.0.lock().subscribers;
        subscribers.retain(Subscriber::is_there);
        if subscribers.len() >= MAX_SUBSCRIBERS {
            return Err(stream);
        }
        if stream.set_nonblocking(true).is_ok() {
            let mut subscriber = Subscriber { stream };
            if subscriber.write(answer) {
                subscribers.push(subscriber);
            }
        }
        Ok(())
    }

    /// Keeps an event and sends it to all subscribers.
    pub(crate) fn tell(&self, event: &Event) {
        let mut state = self.0.lock();
        let (time, number) = (Timestamp::now(), state.number.saturating_add(1));
        state.number = number;
        // An event consists of text and numbers, so it can be represented.
        let Ok(text) = to_raw_value(&Numbered { event, time: format!("{time:.3}"), number }) else { return };
        let line = serde_json::to_vec(&Notification { jsonrpc: "2.0", method: "event", params: &text });
        let line = line.map(|line| [line.as_slice(), b"\n"].concat()).unwrap_or_default();
        state.subscribers.retain_mut(|subscriber| subscriber.write(&line));
        state.keep(time, text);
    }

    /// Returns the last events, at most `last`, from a time on, in milliseconds since 1970. Oldest first.
    pub(crate) fn past(&self, since: Option<i64>, last: Option<u32>) -> Vec<Box<RawValue>> {
        let state = self.0.lock();
        let recent = state.past.iter().filter(|(time, _)| since.is_none_or(|since| time.as_millisecond() >= since));
        let recent: Vec<_> = recent.map(|(_, text)| text).collect();
        let last = last.and_then(|last| usize::try_from(last).ok()).unwrap_or(usize::MAX);
        recent.into_iter().rev().take(last).rev().cloned().collect()
    }
}

impl State {
    fn keep(&mut self, time: Timestamp, text: Box<RawValue>) {
        self.bytes = self.bytes.saturating_add(text.get().len());
        self.past.push_back((time, text));
        while self.past.len() > MAX_KEPT || self.bytes > MAX_KEPT_BYTES {
            let Some((_, dropped)) = self.past.pop_front() else { return };
            self.bytes = self.bytes.saturating_sub(dropped.get().len());
        }
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
    fn subscribers_get_events_in_order() {
        let events = Events::default();
        let (client, server) = UnixStream::pair().unwrap();
        events.tell(&link("before"));
        events.subscribe(server, b"{}\n").unwrap();
        events.tell(&link("vm0"));
        drop(events);
        let lines: Vec<_> = BufReader::new(client).lines().map(Result::unwrap).collect();
        let event =
            r#"{"jsonrpc":"2.0","method":"event","params":{"event":"link","device":"vm0","state":"down","time":""#;
        assert_eq!((lines.len(), lines[0].as_str()), (2, "{}"));
        assert!(lines[1].starts_with(event) && lines[1].ends_with(r#"Z","number":2}}"#), "{lines:?}");
    }

    /// Attack: a subscriber that does not read. It is disconnected, and no thread has waited for it.
    #[test]
    fn a_subscriber_that_does_not_read_is_disconnected() {
        let events = Events::default();
        let (mut slow, a) = UnixStream::pair().unwrap();
        events.subscribe(a, b"").unwrap();
        let event = link(&"x".repeat(1000));
        let mut told = 0;
        while !events.0.lock().subscribers.is_empty() {
            events.tell(&event);
            told += 1;
            assert!(told < 100_000, "a socket holds less");
        }
        let mut text = Vec::new();
        slow.read_to_end(&mut text).unwrap();
        assert!(text.len() > 1000);
    }

    /// Attack: more subscribers than permitted. Those that have disconnected make room.
    #[test]
    fn the_number_of_subscribers_is_bounded() {
        let events = Events::default();
        let mut held = Vec::new();
        for _ in 0..MAX_SUBSCRIBERS {
            let (mine, theirs) = UnixStream::pair().unwrap();
            events.subscribe(theirs, b"").unwrap();
            held.push(mine);
        }
        let (_mine, theirs) = UnixStream::pair().unwrap();
        let given_back = events.subscribe(theirs, b"").unwrap_err();
        held.pop();
        events.subscribe(given_back, b"").unwrap();
    }

    /// Attack: events without end, long ones. Those that are kept are bounded in number and bytes.
    #[test]
    fn the_last_events_can_be_read_later() {
        let events = Events::default();
        (0..2 * MAX_KEPT).for_each(|number| events.tell(&link(&number.to_string())));
        let devices = |past: Vec<Box<RawValue>>| -> Vec<String> {
            let event = |text: Box<RawValue>| serde_json::from_str::<serde_json::Value>(text.get()).unwrap();
            past.into_iter().map(|text| event(text)["device"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(events.past(None, None).len(), MAX_KEPT);
        assert_eq!(devices(events.past(None, Some(2))), ["1998", "1999"]);
        let now = Timestamp::now().as_millisecond();
        assert_eq!(
            (events.past(Some(now - 3_600_000), None).len(), events.past(Some(now + 60_000), None).len()),
            (MAX_KEPT, 0)
        );
        (0..MAX_KEPT).for_each(|_| events.tell(&link(&"x".repeat(10_000))));
        let state = events.0.lock();
        let held: usize = state.past.iter().map(|(_, text)| text.get().len()).sum();
        assert_eq!(held, state.bytes);
        assert!((MAX_KEPT_BYTES / 2..=MAX_KEPT_BYTES).contains(&held), "{held} bytes");
    }

    #[test]
    fn all_kinds_have_their_names() {
        let text = || "x".to_owned();
        let all = [
            Event::DeviceAdded { device: text(), network: text() },
            Event::DeviceRemoved { device: text(), network: text() },
            link("x"),
            Event::Carrier { network: text(), interface: text(), state: text(), mtu: Some(1500) },
            Event::Failover { network: text(), interface: text() },
            Event::Client { device: text(), network: text(), connected: true },
            Event::ClientRecovered { device: text(), network: text(), network_function: true, problem: None },
            Event::QueuePairFailed {
                device: text(),
                network: text(),
                qpn: 1,
                peer: IpAddr::from([10, 0, 0, 1]),
                cause: FailureCause::CqOverrun,
                history: text(),
                help: text(),
            },
            Event::AddressConflict {
                device: text(),
                network: text(),
                address: IpAddr::from([10, 0, 0, 1]),
                vlan: None,
                kept: true,
            },
            Event::NetworkEnded { network: text(), how: text(), lost_vms: vec![] },
            Event::NetworkHandedOver { network: text(), millis: 1 },
            Event::ProcessWedged { network: text(), pid: 1 },
            Event::ProcessGone { network: text(), pid: 1 },
        ];
        let names = all.map(|event| serde_json::to_value(event).unwrap()["event"].as_str().unwrap().to_owned());
        assert_eq!(names, Event::NAMES);
    }
}
