"""The contract, sentence by sentence: where it stands, how it is read, and which tests prove it.

Tests carry the ids with ``@pytest.mark.contract("C1", …)``; `test_requirements.py` holds both sides against each other.
The tests named here are the ones to read first, not all that carry the id. What nothing proves yet is ``open``, with the
reason and what it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One sentence of the contract. ``source`` is the tool whose description says it; either ``tests`` or ``open``."""

    sentence: str
    source: str
    tests: tuple[str, ...] = ()
    open: str | None = None


REQUIREMENTS: dict[str, Requirement] = {
    "C1": Requirement(
        sentence="A conversation id is 8 to 64 characters from [A-Za-z0-9_-]; a malformed one is rejected outright.",
        source="append_memory",
        tests=(
            "test_bad_input.py::test_a_malformed_id_is_refused_before_anything_is_stored",
            "test_bad_input.py::test_ids_at_the_bounds_are_taken",
            "test_payload.py::test_new_conversation_ids_are_valid_and_differ",
            "test_server_tools.py::test_any_other_id_is_refused_outright",
        ),
    ),
    "C2": Requirement(
        sentence=(
            "A batch is 1 to 250 items; an item's serialized JSON is at most 256 KiB, a batch's at most 1 MiB. Equal is "
            "allowed, and measured are the bytes of compact UTF-8 JSON that are stored and sent."
        ),
        source="append_memory",
        tests=(
            "test_bad_input.py::test_one_byte_or_item_too_many_is_refused_whole",
            "test_bad_input.py::test_an_item_of_262144_bytes_is_kept_and_comes_back",
            "test_bad_input.py::test_full_batches_are_kept_and_come_back",
            "test_limits.py::test_the_numbers_are_those_of_the_contract",
            "test_server_tools.py::test_an_item_of_262144_bytes_is_accepted_and_one_more_byte_is_not",
            "test_server_tools.py::test_a_batch_of_1048576_bytes_is_accepted_and_one_more_byte_is_not",
        ),
    ),
    "C2.conversation": Requirement(
        sentence="A conversation holds at most 100,000 items; what is beyond is kept and sent nowhere else by itself.",
        source="append_memory",
        tests=(
            "test_open_log.py::test_a_full_conversation_is_sealed_and_what_does_not_fit_is_kept",
            "test_server_tools.py::test_a_conversation_holds_100000_items_and_not_one_more",
        ),
    ),
    "C2.roll-over": Requirement(
        sentence="A conversation that grows beyond 100,000 items goes on in a successor.",
        source="append_memory",
        open="the contract leaves it to the application; a deterministic successor belongs to the framework adapters",
    ),
    "C3": Requirement(
        sentence=(
            "Contents are stored verbatim, never interpreted: what append accepts, replay reads back equal, type for "
            "type; what could not come back is refused at append, with its JSON path."
        ),
        source="append_memory",
        tests=(
            "test_bad_input.py::test_what_would_not_come_back_equal_is_refused_wherever_it_stands",
            "test_bad_input.py::test_only_an_object_is_an_item",
            "test_bad_input.py::test_what_has_a_json_value_is_kept_as_that_value",
            "test_json_suite.py::test_what_python_reads_from_each_valid_document_comes_back_equal",
            "test_payload.py::test_an_item_is_either_kept_or_refused_by_name_and_never_changed",
            "test_server_verbatim.py::test_a_payload_is_spliced_back_byte_by_byte",
            "test_server_verbatim.py::test_what_is_not_json_is_refused_and_nothing_is_stored",
        ),
    ),
    "C4": Requirement(
        sentence=(
            "The batch commits atomically and in order, all items or none. The caller's batch is what is stored, sent, "
            "acknowledged and refused; whole batches may share a request, and none is ever split."
        ),
        source="append_memory",
        tests=(
            "test_bad_input.py::test_one_byte_or_item_too_many_is_refused_whole",
            "test_open_log.py::test_a_full_conversation_is_sealed_and_what_does_not_fit_is_kept",
            "test_sender.py::test_whole_batches_are_merged_and_none_is_split",
            "test_sender.py::test_each_conversation_has_one_request_in_flight_and_keeps_its_order",
            "test_server_tools.py::test_an_item_that_is_no_object_refuses_the_whole_batch",
        ),
    ),
    "C5": Requirement(
        sentence=(
            "Exceeding the site's rate limit is a permanent error that says when to come back. Permanent for the call: the "
            "log keeps the batch, sends nothing for the site until then, and never makes a dead letter of it."
        ),
        source="append_memory",
        tests=(
            "test_open_log.py::test_flush_returns_early_when_the_server_asked_for_more_time_than_there_is",
            "test_client.py::test_a_rate_limit_is_raised_at_once_with_its_time",
            "test_replay.py::test_a_read_waits_out_a_pause_that_its_deadline_allows",
            "test_sender.py::test_a_pause_outlives_the_process",
        ),
    ),
    "C6": Requirement(
        sentence=(
            "Any other failure is safe to retry after buffering the batch, and duplicates from retries are tolerated. "
            "Unknown codes are transient, for ever; an error says whether the request was not sent, refused, or neither "
            "is known."
        ),
        source="append_memory",
        tests=(
            "test_bad_input.py::test_a_closed_port_makes_it_wait_and_the_server_coming_back_drains_it",
            "test_bad_input.py::test_a_wrong_address_blocks_with_the_reason_and_keeps_everything",
            "test_replay.py::test_each_item_comes_once_while_acknowledgements_race",
            "test_retry.py::test_a_failed_append_has_one_meaning",
            "test_sender.py::test_lost_answers_neither_lose_nor_repeat_a_batch",
        ),
    ),
    "C7": Requirement(
        sentence=(
            "Sequence numbers are per conversation, 0-based, gapless, in append order, and a batch shares one recorded_at. "
            "Both are verified on every acknowledgement and page, and tell whether an unknown outcome landed."
        ),
        source="append_memory, replay_memory",
        tests=(
            "test_replay.py::test_a_page_that_does_not_count_on_is_an_error_and_no_end",
            "test_replay.py::test_a_conversation_comes_back_whole_whatever_its_length",
            "test_sender.py::test_an_acknowledgement_is_held_against_the_numbering_before_it_is_believed",
            "test_server_tools.py::test_seq_counts_from_zero_without_gaps_and_a_batch_shares_one_time",
        ),
    ),
    "C7.several-writers": Requirement(
        sentence="Where several writers append to one conversation, each still tells its own items from the others'.",
        source="append_memory, replay_memory",
        open="numbers alone cannot prove it: it belongs to stamped payloads (`stamp=True`), which are refused until then",
    ),
    "C8": Requirement(
        sentence=(
            "A page shorter than its limit, an empty one included, is the end of the log; an unknown conversation is empty "
            "and no error. Pages of 1 to 1,000 are asked for, and an end, a failure and a truncation never look alike."
        ),
        source="replay_memory",
        tests=(
            "test_bad_input.py::test_a_page_of_none_or_of_more_than_a_thousand_is_not_asked_for",
            "test_replay.py::test_a_conversation_comes_back_whole_whatever_its_length",
            "test_replay.py::test_offset_and_limit_cut_out_a_range",
            "test_replay.py::test_an_answer_of_another_shape_is_an_error_and_no_end",
            "test_replay.py::test_an_unknown_conversation_is_empty_and_an_unreachable_server_is_not",
            "test_server_tools.py::test_replay_pages_by_position_until_a_short_page",
        ),
    ),
    "C9": Requirement(
        sentence=(
            "A read-only Bearer token is rejected with unprocessable_parameters. That is the operator's matter, like a "
            "wrong password: the log keeps everything, says so once, and never makes a dead letter of it."
        ),
        source="replay_memory",
        tests=(
            "test_bad_input.py::test_a_wrong_password_stops_sending_and_nothing_else",
            "test_bad_input.py::test_a_read_only_token_is_the_operators_problem_and_no_dead_letter",
            "test_client.py::test_a_read_only_token_is_an_authentication_error",
            "test_server_http.py::test_a_bearer_token_is_refused_by_every_site_tool",
        ),
    ),
    "C10": Requirement(
        sentence=(
            "Recall Memory gives the most recent items and List Conversations the site's conversations. No schema of "
            "theirs is public: ours is the reference server's, and the client takes either order and further fields."
        ),
        source="replay_memory (related tools)",
        tests=(
            "test_replay.py::test_recall_gives_the_newest_items_oldest_of_them_first",
            "test_replay.py::test_a_server_that_recalls_newest_first_is_understood",
            "test_replay.py::test_what_the_contract_does_not_name_is_let_through",
            "test_server_tools.py::test_conversations_are_listed_by_id_page_by_page",
        ),
    ),
    "C11": Requirement(
        sentence=(
            "The rate limit's error comes with a Retry-After header. Status, JSON-RPC error and a result marked as error "
            "are one tree of errors; Retry-After, in seconds or as a date, is never undercut, up to an hour."
        ),
        source="append_memory",
        tests=(
            "test_protocol.py::test_every_failure_is_the_one_error_that_says_what_happened",
            "test_retry.py::test_a_retry_after_is_read_as_http_means_it_or_not_at_all",
            "test_retry.py::test_a_retry_after_is_never_undercut",
            "test_open_log.py::test_flush_returns_early_when_the_server_asked_for_more_time_than_there_is",
        ),
    ),
    "C12": Requirement(
        sentence=(
            "A record's events come oldest first, with gaps in their sequence; `after` is exclusive, a page holds at most "
            "50, and a short one is the last. The order is verified."
        ),
        source="memory_history",
        tests=(
            "test_team.py::test_a_history_is_read_to_its_end_across_gaps_and_pages",
            "test_team.py::test_a_page_that_does_not_ascend_behind_after_is_an_error",
            "test_server_team.py::test_after_is_exclusive_and_pages_end_with_a_short_one",
        ),
    ),
    "C12.real-server": Requirement(
        sentence="The real team server answers memory_history, and what writes it, as the reference server does.",
        source="memory_history",
        tests=(
            "test_team_oracle.py::test_the_reference_server_answers_a_random_walk_as_the_real_one_did",
            "test_team_oracle.py::test_the_reference_server_answers_each_call_as_the_real_one_did",
            "test_team_oracle.py::test_the_client_understands_what_the_real_server_said",
            "test_team_oracle.py::test_the_real_server_answers_each_call_as_it_did_when_it_was_recorded",
        ),
    ),
    "C12.written": Requirement(
        sentence="After a write that timed out, it can be told whether it happened, and a retry happens once.",
        source="memory_history",
        tests=(
            "test_team.py::test_to_ask_leaves_no_trace",
            "test_team.py::test_a_write_is_the_same_to_the_byte_each_time",
            "test_team.py::test_a_write_whose_answer_is_lost_is_sent_again_and_happens_once",
            "test_team.py::test_after_a_restart_the_request_id_tells_whether_it_happened_and_makes_sure",
            "test_team.py::test_the_history_tells_whether_an_update_or_a_deletion_happened",
            "test_team_oracle.py::test_the_client_understands_what_the_real_server_said",
        ),
    ),
    "C13": Requirement(
        sentence="The result comes as JSON in a text block; as structured content, where there is any, it is the same.",
        source="memory_history",
        tests=(
            "test_protocol.py::test_every_form_of_success_is_the_value",
            "test_replay.py::test_an_answer_of_another_shape_is_an_error_and_no_end",
            "test_server_team.py::test_history_is_json_text_with_the_record_and_all_that_it_replaced",
        ),
    ),
}
