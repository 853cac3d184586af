//! Shared parts of the fuzz targets. The targets themselves are in `fuzz_targets`, in a folder for each crate.

pub mod input;
pub mod pvrdma_dev;
pub mod rxe;
pub mod vmxnet3;
