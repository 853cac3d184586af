//! Simulates a leaf-spine fabric on virtual time: switches with shallow output queues that mark or drop, without
//! priority flow control, and hosts that run the transport of `pvrdma-roce` and the control loops of `pvrdma-pacing`.
//!
//! An [`Experiment`] names the fabric, the connections and a seed, from which everything follows: the same experiment
//! always gives the same [`Figures`].

mod connection;
mod fabric;
mod frame;
mod plan;
mod random;
mod report;
mod switches;
mod workload;

pub use fabric::{Fabric, Fault, Finished, Progress};
pub use plan::{Plan, Transport};
pub use report::{insert, table};
pub use switches::SwitchCounts;
pub use workload::{Experiment, Figures, Pattern};
