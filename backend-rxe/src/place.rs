//! State of a station, which a restart of the device's driver does not end.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;
use pvrdma_verbs::VerbsError;

use crate::capture::Point;
use crate::failures::FailureObserver;
use crate::faults::FaultPoint;
use crate::flows::FlowTable;
use crate::iwarp::sockets::IwarpConfig;
use crate::port::Port;
use crate::port::uplink::Uplink;
use crate::share::Share;

/// State of a station.
#[derive(Debug)]
pub(crate) struct Place {
    uplink: Mutex<Option<Uplink>>,
    iwarp: Mutex<Option<IwarpConfig>>,
    pub(crate) mac: MacAddr,
    /// Share of the device in common resources.
    pub(crate) share: Arc<Share>,
    /// Traffic of the device, by peer.
    pub(crate) flows: Arc<FlowTable>,
    /// Observer of failed queue pairs.
    pub(crate) failures: Arc<FailureObserver>,
    /// Faults on request.
    pub(crate) faults: Arc<FaultPoint>,
    /// Captures.
    pub(crate) point: Arc<Point>,
}

impl Place {
    pub(crate) fn new(mac: MacAddr) -> Self {
        Self {
            uplink: Mutex::default(),
            iwarp: Mutex::default(),
            mac,
            share: Arc::default(),
            flows: Arc::default(),
            failures: Arc::default(),
            faults: Arc::default(),
            point: Arc::new(Point::new(mac)),
        }
    }

    /// Connects the device to a network.
    ///
    /// # Errors
    /// The device is connected already, or `start` fails.
    pub(crate) fn plug(&self, start: impl FnOnce() -> Result<Uplink, VerbsError>) -> Result<(), VerbsError> {
        let mut uplink = self.uplink.lock();
        if uplink.is_some() {
            return Err(VerbsError::InUse("MAC address"));
        }
        *uplink = Some(start()?);
        Ok(())
    }

    /// Disconnects the device from its network.
    pub(crate) fn unplug(&self) {
        let uplink = self.uplink.lock().take();
        // Its threads end without the lock.
        drop(uplink);
    }

    /// Sets the peers that the next adapter reaches by iWARP.
    pub(crate) fn set_iwarp(&self, config: Option<IwarpConfig>) {
        *self.iwarp.lock() = config;
    }

    /// Returns the peers that an adapter reaches by iWARP.
    pub(crate) fn iwarp(&self) -> Option<IwarpConfig> {
        self.iwarp.lock().clone()
    }

    /// Returns the port, if there is one.
    pub(crate) fn port(&self) -> Option<Arc<Port>> {
        self.uplink.lock().as_ref().map(|uplink| Arc::clone(&uplink.port))
    }
}
