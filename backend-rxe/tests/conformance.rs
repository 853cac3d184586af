//! The verbs conformance suite on this adapter.

use backend_rxe::{Rxe, RxeConfig};
use rdma_backend::conformance::Profile;

fn backend() -> (Rxe, Profile) {
    (Rxe::new(RxeConfig::default()).expect("the engine starts"), Profile::FULL)
}

rdma_backend::conformance_tests!(backend);
