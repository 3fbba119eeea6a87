//! Tickets of sends: docs/protocol.md §2.4 and §4.4, docs/architecture.md §6 item 2.

use std::time::Duration;

use uniffle_client::send::SendForm;
use uniffle_wire::types::{PartitionId, TicketId};
use uniffle_worker::clock::Instant;
use uniffle_worker::proto::StatusCode;

use super::client::{Transport, refused, successful};
use crate::grpc::blocks::{batch, block, blocks};
use crate::grpc::fixture::{Setup, key};

over_both_transports!(
    expired_ticket_is_refused_and_a_new_one_succeeds,
    ticket_is_single_use,
    ticket_of_another_app_is_refused_and_stays_valid,
    send_larger_than_its_ticket_stores_nothing,
);

async fn expired_ticket_is_refused_and_a_new_one_succeeds(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 0)]).await;
    // Large enough that the worker refuses the ticket before it has received the whole request.
    let all = [blocks(0, 1, 0..5), vec![block(0, 1, 5, 5 << 20)]].concat();
    let ticket = fixture.client.require_buffer(&key, &batch(0, &all)).await.unwrap();
    assert!(fixture.memory().tickets().pre_allocated_bytes() > 0);
    assert_eq!(fixture.memory().expire_tickets(Instant::now() + Duration::from_secs(3600)), 1);
    fixture.assert_memory_is_free().await;

    let sent = client.send(&key, ticket, SendForm::Classic, &batch(0, &all)).await;
    let text = refused(sent, StatusCode::InternalError);
    assert!(text.contains("ticket"), "{text}");
    fixture.assert_memory_is_free().await;
    client.push(&fixture, &key, &batch(0, &all)).await;
    fixture.assert_reads(&key, 0, &all).await;
    drop(client);
    fixture.finish().await;
}

async fn ticket_is_single_use(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 0)]).await;
    let (first, second) = (blocks(0, 1, 0..3), blocks(0, 2, 0..3));
    let ticket = fixture.client.require_buffer(&key, &batch(0, &first)).await.unwrap();
    successful(client.send(&key, ticket, SendForm::Classic, &batch(0, &first)).await);
    let used = fixture.memory().budget().used();
    for invalid in [ticket, TicketId(0), TicketId(-1), TicketId(i64::MAX)] {
        let sent = client.send(&key, invalid, SendForm::Classic, &batch(0, &second)).await;
        refused(sent, StatusCode::InternalError);
    }
    assert_eq!(fixture.memory().budget().used(), used);
    fixture.assert_reads(&key, 0, &first).await;
    drop(client);
    fixture.finish().await;
}

async fn ticket_of_another_app_is_refused_and_stays_valid(transport: Transport) {
    let (fixture, client, owner) = transport.start(Setup::default(), &[(0, 0)]).await;
    let thief = key("app-2", 1);
    fixture.client.register(&thief, &[(0, 0)]).await.unwrap();
    let all = blocks(0, 1, 0..3);
    let ticket = fixture.client.require_buffer(&owner, &batch(0, &all)).await.unwrap();
    let stolen = client.send(&thief, ticket, SendForm::Classic, &batch(0, &all)).await;
    refused(stolen, StatusCode::InternalError);
    fixture.assert_reads(&thief, 0, &[]).await;
    successful(client.send(&owner, ticket, SendForm::Classic, &batch(0, &all)).await);
    fixture.assert_reads(&owner, 0, &all).await;
    drop(client);
    fixture.finish().await;
}

async fn send_larger_than_its_ticket_stores_nothing(transport: Transport) {
    let (fixture, client, key) = transport.start(Setup::default(), &[(0, 3)]).await;
    let parts: Vec<_> = (0..4).map(|p| (PartitionId(p), vec![block(p, 1, 0, 64 << 10)])).collect();
    for form in client.forms() {
        // The first three blocks fit.
        let ticket_bytes = 200 << 10;
        let ticket = fixture.ticket(&key, ticket_bytes).await;
        let text = refused(client.send(&key, ticket, *form, &parts).await, StatusCode::InternalError);
        assert!(text.contains(&ticket_bytes.to_string()), "{text}");
        fixture.assert_memory_is_free().await;
        for partition in 0..4 {
            fixture.assert_reads(&key, partition, &[]).await;
        }
    }
    client.push(&fixture, &key, &parts).await;
    drop(client);
    fixture.finish().await;
}
