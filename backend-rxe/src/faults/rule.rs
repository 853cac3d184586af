//! Rules: which fault, for which queue pair, and when.

use std::fmt;
use std::str::FromStr;

use pvrdma_verbs_types::Qpn;
use serde::{Deserialize, Serialize};

/// Place where a fault takes effect. The rules of a device count the times that its connected queue pairs reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Site {
    /// A send request is taken from its ring and checked.
    Request,
    /// A request packet arrives at the responder, also a retransmission. In local delivery a request is one packet.
    Arrival,
    /// A request needs a receive.
    Wanted,
    /// The responder has taken a receive.
    Receive,
    /// The responder checks that its queue pair permits READs, WRITEs or atomics.
    Permission,
    /// The responder checks the key of a READ, WRITE or atomic that is not empty.
    Access,
    /// A completion is published.
    Completion,
}

macro_rules! faults {
    ($($(#[doc = $doc:literal])+ $variant:ident = $word:literal at $site:ident;)+) => {
        /// Fault of a connected queue pair.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Fault {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Fault {
            /// All faults.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the name in rules.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// Returns the place where it takes effect.
            pub const fn site(self) -> Site {
                match self { $(Self::$variant => Site::$site,)+ }
            }
        }
    };
}

faults! {
    /// The request is longer than allowed. It ends with a local length error.
    LocalLength = "local-length" at Request;
    /// The keys of the request's own memory are invalid. It ends with a local protection error.
    LocalProtection = "local-protection" at Request;
    /// The operation is not supported. The request ends with a local QP operation error.
    LocalOperation = "local-operation" at Request;
    /// The queue pair enters the error state before the request runs, as by a modify command. All requests are flushed.
    QpError = "qp-error" at Request;
    /// The request is lost on its way. Its sender retransmits it, and gives up after its retries.
    Loss = "loss" at Arrival;
    /// No receive is posted. The peer waits and retries, and gives up after its RNR retries.
    Rnr = "rnr" at Wanted;
    /// The receive has no room for data: local length error here, remote invalid request at the peer.
    ReceiveLength = "receive-length" at Receive;
    /// The memory of the receive is not registered: local protection error here, remote operation error at the peer.
    ReceiveProtection = "receive-protection" at Receive;
    /// The receive is malformed: local QP operation error here, remote operation error at the peer.
    ReceiveMalformed = "receive-malformed" at Receive;
    /// The receive ring cannot be read: fatal event of the queue pair or error event of its shared receive queue, and
    /// remote operation error at the peer.
    ReceiveQueue = "receive-queue" at Receive;
    /// The key does not permit this access: access error event here, remote access error at the peer.
    RemoteAccess = "remote-access" at Access;
    /// The key is revoked: this access and all later ones with the same key are refused.
    KeyRevoked = "key-revoked" at Access;
    /// The queue pair does not permit such operations: request error event here, remote invalid request at the peer.
    InvalidRequest = "invalid-request" at Permission;
    /// The completion queue is full: its error event, and the error state for all queue pairs that use it.
    CqOverrun = "cq-overrun" at Completion;
}

/// Time of a fault, in a count of the times that its place was reached. Counts begin at 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trigger {
    /// The nth time, and the times directly after it up to the limit of the rule.
    Nth(u64),
    /// Each nth time.
    Every(u64),
    /// One of n times on average, chosen by the seed.
    OneIn(u32),
}

/// A fault, and when it happens: `loss/nth:5/times:3`. The parts behind the fault are optional and in any order.
///
/// | part | meaning |
/// | --- | --- |
/// | `qp:NUMBER` | only this queue pair; its places are counted alone |
/// | `nth:N` | the nth time; default: the first |
/// | `every:N` | each nth time |
/// | `one-in:N` | one of N times on average |
/// | `times:N` or `times:always` | highest number of faults; default: 1 with `nth`, otherwise unlimited |
/// | `seed:N` | seed of `one-in`; default: 1 |
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FaultRule {
    /// The fault.
    pub fault: Fault,
    /// The only queue pair. `None`: all connected ones of the device.
    pub qp: Option<Qpn>,
    /// When it happens.
    pub trigger: Trigger,
    /// Highest number of faults. `None`: unlimited.
    pub times: Option<u64>,
    /// Seed of [`Trigger::OneIn`].
    pub seed: u64,
}

impl FaultRule {
    /// Longest text of a rule, in bytes.
    pub const MAX_LEN: usize = 128;

    /// Returns a rule that acts once, at the first time.
    pub const fn new(fault: Fault) -> Self {
        Self { fault, qp: None, trigger: Trigger::Nth(1), times: Some(1), seed: 1 }
    }
}

/// Parts of a rule, each at most once.
#[derive(Default)]
struct Parts {
    qp: Option<u64>,
    trigger: Option<Trigger>,
    times: Option<Option<u64>>,
    seed: Option<u64>,
}

/// Sets a part that must not be set yet.
fn once<T>(part: &mut Option<T>, value: T, text: &str) -> Result<(), String> {
    match part.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("'{text}' repeats or contradicts a part before it")),
    }
}

/// Parses a number, decimal or hexadecimal with `0x`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

impl Parts {
    fn take(&mut self, text: &str) -> Result<(), String> {
        let wrong = || format!("'{text}' is not a part of a fault, such as nth:5");
        let (key, value) = text.split_once(':').ok_or_else(wrong)?;
        if (key, value) == ("times", "always") {
            return once(&mut self.times, None, text);
        }
        let number = number(value).ok_or_else(|| format!("'{text}': '{value}' is not a number"))?;
        let counted = || if number == 0 { Err(format!("'{text}': counts begin at 1")) } else { Ok(number) };
        match key {
            "qp" => once(&mut self.qp, number, text),
            "nth" => once(&mut self.trigger, Trigger::Nth(counted()?), text),
            "every" => once(&mut self.trigger, Trigger::Every(counted()?), text),
            "one-in" => {
                let most = u32::try_from(counted()?).map_err(|_| format!("'{text}': at most {}", u32::MAX))?;
                once(&mut self.trigger, Trigger::OneIn(most), text)
            }
            "times" => once(&mut self.times, Some(counted()?), text),
            "seed" => once(&mut self.seed, number, text),
            _ => Err(wrong()),
        }
    }
}

impl FromStr for FaultRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > Self::MAX_LEN {
            return Err(format!("a fault is at most {} bytes long", Self::MAX_LEN));
        }
        let mut words = text.split('/');
        let name = words.next().unwrap_or_default();
        let fault = Fault::ALL.iter().copied().find(|fault| fault.word() == name);
        let Some(fault) = fault else {
            let known: Vec<_> = Fault::ALL.iter().map(|fault| fault.word()).collect();
            return Err(format!("'{name}' is not a fault: {}", known.join(", ")));
        };
        let mut parts = Parts::default();
        words.try_for_each(|word| parts.take(word))?;
        let in_range = |qp| u32::try_from(qp).ok().filter(|&qp| qp <= 0x00ff_ffff).map(Qpn::new);
        let qp = parts.qp.map(|qp| in_range(qp).ok_or_else(|| format!("{qp} is not the number of a queue pair")));
        let trigger = parts.trigger.unwrap_or(Trigger::Nth(1));
        let times = parts.times.unwrap_or(if matches!(trigger, Trigger::Nth(_)) { Some(1) } else { None });
        Ok(Self { fault, qp: qp.transpose()?, trigger, times, seed: parts.seed.unwrap_or(1) })
    }
}

impl fmt::Display for FaultRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.fault.word())?;
        if let Some(qp) = self.qp {
            write!(f, "/qp:{:#x}", qp.get())?;
        }
        match self.trigger {
            Trigger::Nth(nth) => write!(f, "/nth:{nth}")?,
            Trigger::Every(every) => write!(f, "/every:{every}")?,
            Trigger::OneIn(one_in) => write!(f, "/one-in:{one_in}/seed:{}", self.seed)?,
        }
        match self.times {
            Some(times) => write!(f, "/times:{times}"),
            None => f.write_str("/times:always"),
        }
    }
}

impl TryFrom<String> for FaultRule {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<FaultRule> for String {
    fn from(rule: FaultRule) -> Self {
        rule.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_displayed_as_they_are_written() {
        for text in [
            "loss/nth:5/times:3",
            "rnr/qp:0x101/every:7/times:always",
            "remote-access/one-in:100/seed:9/times:2",
            "receive-length/nth:1/times:1",
        ] {
            assert_eq!(text.parse::<FaultRule>().unwrap().to_string(), text);
        }
        for &fault in Fault::ALL {
            assert_eq!(fault.word().parse(), Ok(FaultRule::new(fault)));
        }
        let rule = FaultRule { qp: Some(Qpn::new(17)), times: None, ..FaultRule::new(Fault::Loss) };
        assert_eq!("loss/times:always/qp:17".parse(), Ok(rule));
        assert_eq!("loss/every:2".parse::<FaultRule>().unwrap().times, None);
    }

    #[test]
    fn mistakes_are_refused() {
        for text in [
            "",
            "lost",
            "loss:0.1",
            "loss/",
            "loss/5",
            "loss/nth:0",
            "loss/nth:x",
            "loss/nth:1/every:2",
            "loss/times:1/times:2",
            "loss/one-in:4294967296",
            "loss/qp:0x1000000",
            "loss/after:3",
            "loss/every:always",
        ] {
            assert!(text.parse::<FaultRule>().is_err(), "{text}");
        }
        let long = format!("loss/nth:{}1", "0".repeat(FaultRule::MAX_LEN));
        assert!(long.parse::<FaultRule>().is_err());
    }
}
