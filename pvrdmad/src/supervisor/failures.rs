//! Failed queue pairs of all networks.

use super::Supervisor;
use crate::failures::Failures;
use crate::protocol::{Reply, Request};

impl Supervisor {
    /// Returns the last failed queue pairs of all devices, or of one, from a time on, in milliseconds since 1970.
    /// Devices that were removed are included, so all networks are asked.
    pub(crate) fn failures(&self, device: Option<&str>, since: Option<i64>) -> Failures {
        let mut all = Failures::default();
        for network in self.all() {
            let request = Request::Failures { device: device.map(str::to_owned), since };
            match network.call(request, Vec::new()) {
                Ok(Reply::Failures(Failures { failures, .. })) => {
                    // A worker must not speak for other networks.
                    let own = failures.into_iter().filter(|failed| failed.network == network.name());
                    all.failures.extend(own);
                }
                _ => all.silent.push(network.name().to_owned()),
            }
        }
        all.failures.sort_by(|one, other| one.time.cmp(&other.time));
        all
    }
}
