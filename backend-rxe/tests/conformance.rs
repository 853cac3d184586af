//! The verbs conformance suite on this adapter.

use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::conformance::Profile;

fn backend() -> (Rxe, Profile) {
    (Rxe::new(RxeConfig::default()).expect("the engine starts"), Profile::FULL)
}

pvrdma_verbs::conformance_tests!(backend);
