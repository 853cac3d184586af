//! Renders a status in the OpenMetrics text format, which Prometheus and others read.
//!
//! Counters keep their names, prefixed by `pvrdma_`. Counters of a device have the labels `network`, `device` and
//! `function`: `rdma`, or `ethernet` for the network function beside it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{self, Registry};
use pvrdma_base::Kind;

use super::catalogue::CounterInfo;
use super::classic::classic;
use super::report::{DaemonStatus, DeviceReport, NetworkState, NetworkStatus, ShareReport};

/// Labels of a sample, in order. Shared, because thousands of samples carry the labels of their device.
#[derive(Clone, Debug)]
struct Labels(Arc<[(&'static str, Arc<str>)]>);

impl Labels {
    fn new<const N: usize>(labels: [(&'static str, &str); N]) -> Self {
        Self(labels.into_iter().map(|(name, value)| (name, value.into())).collect())
    }

    /// Returns these labels and another one.
    fn with(&self, name: &'static str, value: &str) -> Self {
        Self(self.0.iter().cloned().chain([(name, value.into())]).collect())
    }
}

/// A metric family.
#[derive(Debug)]
struct Family {
    kind: Kind,
    /// Meaning, in a sentence.
    help: String,
    /// One sample for each set of labels.
    samples: Vec<(Labels, f64)>,
}

/// Metric families by name.
#[derive(Debug, Default)]
struct Families(BTreeMap<String, Family>);

impl DaemonStatus {
    /// Renders the status in the OpenMetrics text format.
    ///
    /// # Errors
    /// Does not fail in practice: writing to a string always succeeds.
    pub fn openmetrics(&self) -> Result<String, fmt::Error> {
        let mut families = Families::default();
        families.daemon(self);
        for network in &self.networks {
            families.network(network);
        }
        for device in &self.devices {
            families.device(self, device);
        }
        // Estimate of the final length.
        let samples: usize = families.0.values().map(|family| family.samples.len()).sum();
        let mut text = String::with_capacity(samples.saturating_mul(96));
        let mut registry = Registry::with_prefix("pvrdma");
        registry.register_collector(Box::new(families));
        text::encode(&mut text, &registry)?;
        Ok(text)
    }

    /// Renders the status in the older text format of Prometheus.
    ///
    /// # Errors
    /// As for [`Self::openmetrics`].
    pub fn prometheus(&self) -> Result<String, fmt::Error> {
        self.openmetrics().map(|text| classic(&text))
    }
}

impl Families {
    fn add(&mut self, name: &str, kind: Kind, help: &str, labels: &Labels, value: f64) {
        let family = match self.0.get_mut(name) {
            Some(family) => family,
            None => {
                let new = Family { kind, help: help.to_owned(), samples: Vec::new() };
                self.0.entry(name.to_owned()).or_insert(new)
            }
        };
        // A counter that appears in two lists of an object has one sample, with the value of the later list.
        match family.samples.last_mut() {
            Some((last, old)) if Arc::ptr_eq(&last.0, &labels.0) => *old = value,
            _ => family.samples.push((labels.clone(), value)),
        }
    }

    fn total(&mut self, name: &str, help: &str, labels: &Labels, value: u64) {
        self.add(name, Kind::Counter, help, labels, number(value));
    }

    fn gauge(&mut self, name: &str, help: &str, labels: &Labels, value: u64) {
        self.add(name, Kind::Gauge, help, labels, number(value));
    }

    fn is(&mut self, name: &str, help: &str, labels: &Labels, value: bool) {
        self.gauge(name, help, labels, value.into());
    }

    /// Adds the counters that are in the catalogue of the status. Other numbers are not metrics.
    fn counters<'a>(&mut self, status: &DaemonStatus, labels: &Labels, counters: impl Iterator<Item = (&'a str, u64)>) {
        for (name, value) in counters {
            if let Some(CounterInfo { kind, help, .. }) = status.counters.get(name) {
                self.add(name, *kind, help, labels, number(value));
            }
        }
    }

    fn daemon(&mut self, status: &DaemonStatus) {
        let labels = Labels::new([("version", status.version.as_str()), ("backend", &status.backend)]);
        self.gauge("daemon", "Which daemon this is: always 1.", &labels, 1);
        let none = Labels::new([]);
        self.gauge("uptime_seconds", "Seconds since the daemon began.", &none, status.uptime_s);
        let help = "Processes of networks that were killed and do not end.";
        self.gauge("wedged_processes", help, &none, status.wedged.len() as u64);
        let help = "Mappings of guest memory that clients took away.";
        self.total("lost_mappings", help, &none, status.lost_mappings);
        self.counters(status, &none, pairs(&status.control));
    }

    fn network(&mut self, network: &NetworkStatus) {
        let labels = Labels::new([("network", network.name.as_str())]);
        let running = network.state == NetworkState::Running;
        self.is("network_running", "The process of the network serves, and says so in time.", &labels, running);
        self.total("network_restarts", "Processes of the network that ended.", &labels, network.restarts);
        let lost = network.lost_vms.len() as u64;
        let help = "Devices that were removed and whose client's thread does not return from a system call.";
        self.gauge("network_stuck_clients", help, &labels, network.stuck_clients.len() as u64);
        let help = "Devices that the end of a process took from their VM, which has to restart.";
        self.gauge("network_lost_vms", help, &labels, lost);
    }

    fn device(&mut self, status: &DaemonStatus, device: &DeviceReport) {
        let labels = Labels::new([("network", device.network.name.as_str()), ("device", device.name())]);
        let of = |function| labels.with("function", function);
        let rdma = of("rdma");
        self.is("client_connected", "A VMM uses the function.", &rdma, device.client.connected);
        self.is("driver_active", "A guest's driver has started the function.", &rdma, device.phase() == "active");
        self.is("port_active", "The port of the device is active.", &labels, device.port == "active");
        for (kind, count) in device.numbers("objects") {
            self.gauge("objects", "Objects that the guest has made.", &labels.with("kind", kind), count);
        }
        let memory = &device.memory.status;
        self.gauge("memory_mapped_bytes", "Guest memory that is mapped.", &labels, memory.mapped_bytes);
        self.gauge("memory_pinned_bytes", "Guest memory that is kept resident.", &labels, memory.pinned_bytes);
        self.gauge("captures", "Captures that run.", &labels, device.capture.active);
        self.total("captured_frames", "Frames that were captured.", &labels, device.capture.frames);
        self.total("capture_dropped_frames", "Frames that captures lack.", &labels, device.capture.dropped);
        if let Some(share) = &device.share {
            self.share(share, &labels);
        }
        for flow in &device.flows {
            let labels = labels.with("peer", &flow.peer()).with("road", flow.road.word());
            self.total("flow_requests", "Requests to a peer that ended with success.", &labels, flow.requests);
            self.total("flow_out_bytes", "Bytes that requests moved to a peer.", &labels, flow.bytes_out);
            self.total("flow_in_bytes", "Bytes that requests read from a peer.", &labels, flow.bytes_in);
        }
        for (cause, count) in &device.failed {
            let help = "Queue pairs that entered their error state without a request of the guest.";
            self.total("queue_pairs_failed", help, &labels.with("cause", cause.word()), *count);
        }
        self.counters(status, &rdma, device.numbers("counters").chain(device.numbers("adapter")));
        self.counters(status, &rdma, pairs(&device.network.counters));
        if let Some(nic) = &device.nic {
            let ethernet = of("ethernet");
            self.is("client_connected", "A VMM uses the function.", &ethernet, nic.client.connected);
            self.is("driver_active", "A guest's driver has started the function.", &ethernet, nic.active);
            self.counters(status, &ethernet, pairs(&nic.counters));
        }
    }

    fn share(&mut self, share: &ShareReport, labels: &Labels) {
        let seconds = |nanoseconds| number(nanoseconds) / 1e9;
        for (thread, time) in [("engine", share.worker_ns), ("port", share.port_ns)] {
            let help = "Time that threads of the daemon have worked for the device.";
            self.add("processor_seconds", Kind::Counter, help, &labels.with("thread", thread), seconds(time));
        }
        self.total("throttled", "Times that its rate had the device wait.", labels, share.throttled);
    }
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, Family { kind, help, samples }) in &self.0 {
            let metric = match kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            // The encoder appends the unit itself, so it is removed from the name.
            let units = [("_bytes", registry::Unit::Bytes), ("_seconds", registry::Unit::Seconds)];
            let unit = units.iter().find_map(|(suffix, unit)| Some((name.strip_suffix(suffix)?, unit)));
            let (name, unit) = unit.map_or((name.as_str(), None), |(name, unit)| (name, Some(unit)));
            let mut family = encoder.encode_descriptor(name, help, unit, metric)?;
            for (labels, value) in samples {
                let labels = &*labels.0;
                let mut sample = family.encode_family(&labels)?;
                match kind {
                    Kind::Counter => sample.encode_counter::<NoLabelSet, _, f64>(value, None)?,
                    Kind::Gauge => sample.encode_gauge(value)?,
                }
            }
        }
        Ok(())
    }
}

fn pairs(counters: &BTreeMap<String, u64>) -> impl Iterator<Item = (&str, u64)> {
    counters.iter().map(|(name, &value)| (name.as_str(), value))
}

/// Converts a value to a float, as the format requires. Exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "the format has no other numbers")]
const fn number(value: u64) -> f64 {
    value as f64
}
