//! Rules: which fault, for which queue pair, and when.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pvrdma_verbs_types::Qpn;
use serde::{Deserialize, Serialize};

/// Place where a fault takes effect. The rules of a device count the times that its connected queue pairs reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Site {
    /// A send request becomes the next one of its queue pair.
    Turn,
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
    /// A response arrives at the requester. In local delivery a request has one response.
    Response,
}

/// Part of the device that a fault affects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// One queue pair, at the moment of the fault.
    QueuePair,
    /// The whole device, from the fault until its end.
    Device,
}

macro_rules! faults {
    ($($(#[doc = $doc:literal])+ $variant:ident = $word:literal at $site:ident of $scope:ident;)+) => {
        /// Fault of a device.
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

            /// Returns the part of the device that it affects.
            pub const fn scope(self) -> Scope {
                match self { $(Self::$variant => Scope::$scope,)+ }
            }
        }
    };
}

faults! {
    /// The request is longer than allowed. It ends with a local length error.
    LocalLength = "local-length" at Request of QueuePair;
    /// The keys of the request's own memory are invalid. It ends with a local protection error.
    LocalProtection = "local-protection" at Request of QueuePair;
    /// The operation is not supported. The request ends with a local QP operation error.
    LocalOperation = "local-operation" at Request of QueuePair;
    /// The queue pair enters the error state before the request runs, as by a modify command. All requests are flushed.
    QpError = "qp-error" at Request of QueuePair;
    /// The request is lost on its way. Its sender retransmits it, and gives up after its retries.
    Loss = "loss" at Arrival of QueuePair;
    /// No receive is posted. The peer waits and retries, and gives up after its RNR retries.
    Rnr = "rnr" at Wanted of QueuePair;
    /// The receive has no room for data: local length error here, remote invalid request at the peer.
    ReceiveLength = "receive-length" at Receive of QueuePair;
    /// The memory of the receive is not registered: local protection error here, remote operation error at the peer.
    ReceiveProtection = "receive-protection" at Receive of QueuePair;
    /// The receive is malformed: local QP operation error here, remote operation error at the peer.
    ReceiveMalformed = "receive-malformed" at Receive of QueuePair;
    /// The receive ring cannot be read: fatal event of the queue pair or error event of its shared receive queue, and
    /// remote operation error at the peer.
    ReceiveQueue = "receive-queue" at Receive of QueuePair;
    /// The key does not permit this access: access error event here, remote access error at the peer.
    RemoteAccess = "remote-access" at Access of QueuePair;
    /// The key is revoked: this access and all later ones with the same key are refused.
    KeyRevoked = "key-revoked" at Access of QueuePair;
    /// The queue pair does not permit such operations: request error event here, remote invalid request at the peer.
    InvalidRequest = "invalid-request" at Permission of QueuePair;
    /// The completion queue is full: its error event, and the error state for all queue pairs that use it.
    CqOverrun = "cq-overrun" at Completion of QueuePair;
    /// The request begins late, and those behind it wait.
    Delay = "delay" at Turn of QueuePair;
    /// The response is lost on its way. The requester retransmits a request that the peer has executed.
    ResponseLoss = "response-loss" at Response of QueuePair;
    /// The response contradicts the protocol. The request ends with a bad response error, and the peer has executed it.
    BadResponse = "bad-response" at Response of QueuePair;
    /// The device is cut off from its network, and nothing reports that: its peers get no responses.
    PeerGone = "peer-gone" at Arrival of Device;
    /// The link goes down: port error event, and port active event when the fault ends.
    LinkDown = "link-down" at Request of Device;
    /// The GID of the requester leaves the GID table: GID change event to the driver, and another one when the GID
    /// returns.
    GidRemoved = "gid-removed" at Request of Device;
    /// The device fails: it loses all objects, refuses commands until its driver starts it again, and its last event
    /// says so.
    DeviceFatal = "device-fatal" at Request of Device;
}

/// Time of a fault, in a count of the times that its place was reached, or since the rule was set. Counts begin at 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trigger {
    /// The nth time, and the times directly after it up to the limit of the rule.
    Nth(u64),
    /// Each nth time.
    Every(u64),
    /// One of n times on average, chosen by the seed.
    OneIn(u32),
    /// The first time after this duration, and the times directly after it up to the limit of the rule. Link, peer and
    /// device fail at that moment, without a request.
    After(Duration),
}

/// A fault, and when it happens: `loss/nth:5/times:3`. The parts behind the fault are optional and in any order.
///
/// | part | meaning |
/// | --- | --- |
/// | `qp:NUMBER` | only this queue pair; its places are counted alone |
/// | `connection:N` | only the nth connection that the device sets up from now on |
/// | `nth:N` | the nth time; default: the first |
/// | `every:N` | each nth time |
/// | `one-in:N` | one of N times on average |
/// | `after:TIME` | the first time after this duration |
/// | `times:N` or `times:always` | highest number of faults; default: 1 with `nth` and `after`, otherwise unlimited |
/// | `for:TIME` | the rule ends this long after its first fault; for faults of the device: duration of each |
/// | `by:TIME` | length of a delay; default: 10 ms |
/// | `jitter:TIME` | each delay is longer by a random part of this; default: 0 |
/// | `seed:N` | seed of `one-in` and `jitter`; default: 1 |
///
/// A TIME is a number with the unit `us`, `ms` or `s`, at most one day.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FaultRule {
    /// The fault.
    pub fault: Fault,
    /// The only queue pair. `None`: all connected ones of the device.
    pub qp: Option<Qpn>,
    /// The only connection, by the number of connections that were set up since the rule was set. `None`: all.
    pub connection: Option<u64>,
    /// When it happens.
    pub trigger: Trigger,
    /// Highest number of faults. `None`: unlimited.
    pub times: Option<u64>,
    /// Duration of each fault of [`Scope::Device`], or of the rule after its first fault. `None`: until the rules are
    /// replaced.
    pub lasts: Option<Duration>,
    /// Length of a delay.
    pub by: Duration,
    /// Longest random addition to a delay.
    pub jitter: Duration,
    /// Seed of [`Trigger::OneIn`] and of `jitter`.
    pub seed: u64,
}

/// Length of a delay without `by`.
const DELAY: Duration = Duration::from_millis(10);

/// Longest jitter.
const MAX_JITTER: Duration = Duration::from_secs(60 * 60);

/// Shortest time without a fault of the device, and shortest duration of one.
const MIN_DEVICE_TIME: Duration = Duration::from_millis(1);

/// Longest duration in a rule.
const MAX_TIME: Duration = Duration::from_secs(24 * 60 * 60);

impl FaultRule {
    /// Longest text of a rule, in bytes.
    pub const MAX_LEN: usize = 256;

    /// Returns a rule that acts once, at the first time.
    pub const fn new(fault: Fault) -> Self {
        Self {
            fault,
            qp: None,
            connection: None,
            trigger: Trigger::Nth(1),
            times: Some(1),
            lasts: None,
            by: DELAY,
            jitter: Duration::ZERO,
            seed: 1,
        }
    }

    /// Checks that the parts fit the fault.
    fn check(&self) -> Result<(), String> {
        let delays = self.fault == Fault::Delay;
        if !delays && (self.by, self.jitter) != (DELAY, Duration::ZERO) {
            return Err(format!("{} has no 'by' and no 'jitter': they belong to delay", self.fault.word()));
        }
        if self.jitter > MAX_JITTER {
            return Err("a jitter is at most an hour".to_owned());
        }
        // A fault of the device that begins and ends without a pause would keep a worker busy.
        let after = if let Trigger::After(time) = self.trigger { Some(time) } else { None };
        let is_short = [after, self.lasts].into_iter().flatten().any(|time| time < MIN_DEVICE_TIME);
        if self.fault.scope() == Scope::Device && is_short {
            return Err(format!("'after' and 'for' of {} are at least 1ms", self.fault.word()));
        }
        if self.fault == Fault::DeviceFatal && self.lasts.is_some() {
            return Err("device-fatal ends when the driver starts the device again: it has no 'for'".to_owned());
        }
        if self.qp.is_some() && self.connection.is_some() {
            return Err("'qp' and 'connection' exclude each other".to_owned());
        }
        Ok(())
    }
}

/// Parts of a rule, each at most once.
#[derive(Default)]
struct Parts {
    qp: Option<Qpn>,
    connection: Option<u64>,
    trigger: Option<Trigger>,
    times: Option<Option<u64>>,
    lasts: Option<Duration>,
    by: Option<Duration>,
    jitter: Option<Duration>,
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
fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is not a number"))
}

/// Parses a number of times, which is at least 1.
fn count(text: &str) -> Result<u64, String> {
    match number(text)? {
        0 => Err("counts begin at 1".to_owned()),
        count => Ok(count),
    }
}

/// Parses a duration.
fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a time such as 500ms or 2s");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let unit: fn(u64) -> Duration = match text.strip_prefix(digits) {
        Some("us") => Duration::from_micros,
        Some("ms") => Duration::from_millis,
        Some("s") => Duration::from_secs,
        _ => return Err(wrong()),
    };
    let time = unit(digits.parse().map_err(|_| wrong())?);
    if time <= MAX_TIME { Ok(time) } else { Err(format!("'{text}' is longer than a day")) }
}

/// Displays a duration as rules contain it.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        match (micros.is_multiple_of(1_000_000), micros.is_multiple_of(1000)) {
            (true, _) => write!(f, "{}s", micros / 1_000_000),
            (_, true) => write!(f, "{}ms", micros / 1000),
            _ => write!(f, "{micros}us"),
        }
    }
}

/// Parses the number of a queue pair.
fn queue_pair(text: &str) -> Result<Qpn, String> {
    let qpn = u32::try_from(number(text)?).ok().filter(|&qpn| qpn <= 0x00ff_ffff);
    qpn.map(Qpn::new).ok_or_else(|| format!("'{text}' is not the number of a queue pair"))
}

impl Parts {
    fn take(&mut self, text: &str) -> Result<(), String> {
        let wrong = || format!("'{text}' is not a part of a fault, such as nth:5");
        let (key, value) = text.split_once(':').ok_or_else(wrong)?;
        let named = |problem| format!("'{text}': {problem}");
        match key {
            "qp" => once(&mut self.qp, queue_pair(value).map_err(named)?, text),
            "connection" => once(&mut self.connection, count(value).map_err(named)?, text),
            "nth" => once(&mut self.trigger, Trigger::Nth(count(value).map_err(named)?), text),
            "every" => once(&mut self.trigger, Trigger::Every(count(value).map_err(named)?), text),
            "one-in" => {
                let most = u32::try_from(count(value).map_err(named)?);
                let most = most.map_err(|_| format!("'{text}': at most {}", u32::MAX))?;
                once(&mut self.trigger, Trigger::OneIn(most), text)
            }
            "after" => once(&mut self.trigger, Trigger::After(time(value).map_err(named)?), text),
            "times" if value == "always" => once(&mut self.times, None, text),
            "times" => once(&mut self.times, Some(count(value).map_err(named)?), text),
            "for" => once(&mut self.lasts, time(value).map_err(named)?, text),
            "by" => once(&mut self.by, time(value).map_err(named)?, text),
            "jitter" => once(&mut self.jitter, time(value).map_err(named)?, text),
            "seed" => once(&mut self.seed, number(value).map_err(named)?, text),
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
        let Parts { qp, connection, trigger, times, lasts, by, jitter, seed } = parts;
        let trigger = trigger.unwrap_or(Trigger::Nth(1));
        let once = matches!(trigger, Trigger::Nth(_) | Trigger::After(_))
            && (lasts.is_none() || fault.scope() == Scope::Device);
        let rule = Self {
            fault,
            qp,
            connection,
            trigger,
            times: times.unwrap_or_else(|| once.then_some(1)),
            lasts,
            by: by.unwrap_or(DELAY),
            jitter: jitter.unwrap_or_default(),
            seed: seed.unwrap_or(1),
        };
        rule.check()?;
        Ok(rule)
    }
}

impl fmt::Display for FaultRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.fault.word())?;
        if let Some(qp) = self.qp {
            write!(f, "/qp:{:#x}", qp.get())?;
        }
        if let Some(connection) = self.connection {
            write!(f, "/connection:{connection}")?;
        }
        match self.trigger {
            Trigger::Nth(nth) => write!(f, "/nth:{nth}")?,
            Trigger::Every(every) => write!(f, "/every:{every}")?,
            Trigger::OneIn(one_in) => write!(f, "/one-in:{one_in}")?,
            Trigger::After(time) => write!(f, "/after:{}", Time(time))?,
        }
        if self.fault == Fault::Delay {
            write!(f, "/by:{}", Time(self.by))?;
        }
        if !self.jitter.is_zero() {
            write!(f, "/jitter:{}", Time(self.jitter))?;
        }
        if matches!(self.trigger, Trigger::OneIn(_)) || !self.jitter.is_zero() {
            write!(f, "/seed:{}", self.seed)?;
        }
        match self.times {
            Some(times) => write!(f, "/times:{times}")?,
            None => f.write_str("/times:always")?,
        }
        self.lasts.map_or(Ok(()), |lasts| write!(f, "/for:{}", Time(lasts)))
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
            "delay/connection:3/every:2/by:20ms/jitter:1500us/seed:9/times:always",
            "rnr/after:2s/times:always/for:500ms",
            "link-down/after:2s/times:1/for:500ms",
        ] {
            assert_eq!(text.parse::<FaultRule>().unwrap().to_string(), text);
        }
        for &fault in Fault::ALL {
            assert_eq!(fault.word().parse(), Ok(FaultRule::new(fault)));
        }
        // The longest rule is displayed in a form that is accepted.
        let most = u64::MAX;
        let long = format!("receive-malformed/connection:{most}/one-in:{}/times:{most}/for:86399999999us", u32::MAX);
        let long = long.parse::<FaultRule>().unwrap().to_string();
        assert_eq!(long.parse::<FaultRule>().unwrap().to_string(), long);
        let rule = FaultRule { qp: Some(Qpn::new(17)), times: None, ..FaultRule::new(Fault::Loss) };
        assert_eq!("loss/times:always/qp:17".parse(), Ok(rule));
        assert_eq!("loss/every:2".parse::<FaultRule>().unwrap().times, None);
        // A fault of the device happens once and lasts; a fault of queue pairs happens again and again for that time.
        assert_eq!("link-down/for:1s".parse::<FaultRule>().unwrap().times, Some(1));
        assert_eq!("rnr/for:1s".parse::<FaultRule>().unwrap().times, None);
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
            "loss/after:3m",
            "loss/after:86401s",
            "loss/for:-1s",
            "loss/by:1s",
            "rnr/jitter:1s",
            "device-fatal/for:1s",
            "loss/qp:3/connection:3",
            "loss/connection:0",
            "loss/nth:3/after:1s",
            "loss/every:always",
        ] {
            assert!(text.parse::<FaultRule>().is_err(), "{text}");
        }
        let long = format!("loss/nth:{}1", "0".repeat(FaultRule::MAX_LEN));
        assert!(long.parse::<FaultRule>().is_err());
    }
}
