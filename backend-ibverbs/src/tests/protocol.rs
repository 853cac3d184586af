//! Adapters and ports that do not speak RoCE are refused at the start.

use crate::fake::FakeBackend;
use crate::sys::{LINK_LAYER_ETHERNET, LINK_LAYER_INFINIBAND, TRANSPORT_IB, TRANSPORT_IWARP};

/// Returns the error of a start on such an adapter.
fn refusal(transport: i32, link_layer: u8) -> String {
    let backend = FakeBackend::new();
    backend.host.speak(transport, link_layer);
    backend.start().expect_err("the fake adapter has no GID table, so no start succeeds").to_string()
}

#[test]
fn an_iwarp_adapter_is_refused_with_the_remedy() {
    let said = refusal(TRANSPORT_IWARP, LINK_LAYER_ETHERNET);
    for part in ["'fake0'", "port 1", "speaks iWARP", "switch the adapter to RoCE", "--backend rxe"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn an_infiniband_port_is_refused_with_link_layer_and_remedy() {
    let said = refusal(TRANSPORT_IB, LINK_LAYER_INFINIBAND);
    for part in ["'fake0'", "port 1", "link layer is InfiniBand", "use an Ethernet port", "--backend rxe"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn unknown_transports_and_link_layers_are_refused_by_number() {
    for (transport, link_layer, part) in [(2, LINK_LAYER_ETHERNET, "transport type 2"), (-1, 1, "transport type -1")] {
        assert!(refusal(transport, link_layer).contains(part));
    }
    assert!(refusal(TRANSPORT_IB, 0).contains("link layer is unknown (0)"));
}

/// The start then continues with the GID table, which the fake adapter does not have.
#[test]
fn a_roce_port_is_accepted() {
    let said = refusal(TRANSPORT_IB, LINK_LAYER_ETHERNET);
    assert!(!said.contains("link layer") && !said.contains("speaks") && said.contains("GID"), "{said}");
}
