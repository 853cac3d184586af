//! One named test.

use std::fmt;

use anyhow::Result;

use crate::image::GuestImage;
use crate::pair::{Link, Pair};

/// Which guest has the server, and what the way is called.
pub(crate) const WAYS: [(usize, &str); 2] = [(1, "a-to-b"), (0, "b-to-a")];

/// What the way to a server in this guest is called.
pub(crate) fn way(server: usize) -> &'static str {
    WAYS.iter().find(|(guest, _)| *guest == server).map_or("?", |(_, name)| name)
}

/// A named test; its function returns a short note for the report.
pub(crate) struct Case {
    /// `group/what`, for `--only`.
    pub(crate) name: String,
    /// The test.
    pub(crate) body: Body,
    /// The test drives kernel modules into warnings on purpose, or looks itself: the runner does not judge the kernel
    /// log.
    pub(crate) ignore_kernel_log: bool,
    /// Set when it takes so long that it runs only when asked for: what to tell those who did not.
    pub(crate) slow: Option<&'static str>,
}

impl Case {
    /// A test.
    pub(crate) fn new(name: impl Into<String>, run: impl Fn(&mut Pair, &Link) -> Result<String> + 'static) -> Self {
        Self { name: name.into(), body: Body::InPair(Box::new(run)), ignore_kernel_log: false, slow: None }
    }

    /// A test that starts what it needs itself.
    pub(crate) fn alone(name: impl Into<String>, run: impl Fn(&GuestImage) -> Result<String> + 'static) -> Self {
        Self { name: name.into(), body: Body::Alone(Box::new(run)), ignore_kernel_log: false, slow: None }
    }

    /// The group of those that have machines of the runner.
    pub(crate) const IN_PAIR: &'static str = "in the pair";

    /// Cases that may share machines have the same.
    pub(crate) fn group(&self) -> &str {
        match self.body {
            Body::InPair(_) => Self::IN_PAIR,
            Body::Alone(_) => self.name.split('/').next().unwrap_or_default(),
        }
    }

    /// The same test, run only when asked for.
    pub(crate) fn slow(mut self, what_to_do: &'static str) -> Self {
        self.slow = Some(what_to_do);
        self
    }

    /// The same test, run only when asked for unless it is one of these.
    pub(crate) fn slow_unless(self, ordinary: &[&str], what_to_do: &'static str) -> Self {
        if ordinary.contains(&&*self.name) { self } else { self.slow(what_to_do) }
    }

    /// What is in its place when nobody has asked for it: the same unless it is slow.
    pub(crate) fn unasked(self) -> Self {
        match self.slow {
            Some(what_to_do) => Self::alone(self.name, move |_| Err(skip(what_to_do))),
            None => self,
        }
    }

    /// The same test, without the check of the kernel log after it.
    pub(crate) fn ignore_kernel_log(mut self) -> Self {
        self.ignore_kernel_log = true;
        self
    }
}

/// What a test works with.
pub(crate) enum Body {
    /// The pair of guests that most tests share, and the link between them.
    InPair(Box<InPair>),
    /// Only the image.
    Alone(Box<Alone>),
}

/// A test in the shared pair.
pub(crate) type InPair = dyn Fn(&mut Pair, &Link) -> Result<String>;

/// A test with machines of its own.
pub(crate) type Alone = dyn Fn(&GuestImage) -> Result<String>;

impl fmt::Debug for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Why a test did not run; an error that the runner counts as skipped.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

impl fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

/// The error of a test that cannot run here.
pub(crate) fn skip(reason: impl Into<String>) -> anyhow::Error {
    Skipped(reason.into()).into()
}
