-- Version 1 of the schema: semaphores. The migration has put the schema at the head of search_path.
--
-- A batch is one call of semaphore_apply_1, and one transaction. If the queue has very many waiters to admit or to drop, it
-- takes several calls, so that none takes too long; the work of the earlier calls stays done even if time runs out. The row
-- of the semaphore, locked for update, serialises batches.
--
-- The other rows, a state and slots that are taken and freed, are changed in place and rarely deleted, and their indexed
-- columns never change. So PostgreSQL reuses the space of old row versions within the page, without a vacuum. It cannot do that while a
-- long transaction, such as a dump, may still read them. The semaphore then moves to a new home: its next row versions have
-- another key, so that readers skip the old ones.
--
-- All times are microseconds since 1970 of clock_timestamp(). Names, ids and labels are ASCII; other bytes are escaped.

CREATE TABLE semaphore (
    id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    era  bigint NOT NULL DEFAULT 0, -- how often it has moved; its home is id * 2^32 + era
    name text COLLATE "C" NOT NULL UNIQUE
) WITH (fillfactor = 90);

CREATE TABLE semaphore_state (
    home      bigint PRIMARY KEY,
    fence     bigint NOT NULL DEFAULT 0, -- the highest handed out
    ticket    bigint NOT NULL DEFAULT 0, -- the highest handed out
    seen      bigint NOT NULL DEFAULT 0, -- the latest time of a batch
    permits   bigint NOT NULL DEFAULT 0, -- in force; 0 if each process uses its own number
    version   bigint NOT NULL DEFAULT 0, -- of permits
    used      bigint NOT NULL DEFAULT 0 CHECK (used >= 0), -- permits held
    earliest  bigint NOT NULL DEFAULT 0, -- end of a lease; 0 without holders
    slots     int NOT NULL DEFAULT 0, -- in all, numbered from 1
    held      int NOT NULL DEFAULT 0 CHECK (held >= 0), -- slots of kind 1; the next three those of kinds 2, 3 and 4
    queued    int NOT NULL DEFAULT 0 CHECK (queued >= 0),
    idle      int NOT NULL DEFAULT 0 CHECK (idle >= 0),
    processes int NOT NULL DEFAULT 0 CHECK (processes >= 0),
    strayed   int NOT NULL DEFAULT 0 -- row versions without room in their page since the last move
) WITH (fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 5000);

-- kind      1 holder      2 waiter      3 waits until there are no holders       4 process with waiters      0 or less: free
-- id        of the request                                                       of the process
-- permits   held          wanted
-- number    fence         ticket                                                 grants sent to it
-- since     granted       its process'                                           alive until
--                         number
-- until     lease's end   lease's                                                patience's end
--                         length
-- process   its           its           its
-- label     its           its                                                    channel
CREATE TABLE semaphore_slot (
    home    bigint NOT NULL,
    permits bigint NOT NULL DEFAULT 0,
    number  bigint NOT NULL DEFAULT 0,
    since   bigint NOT NULL DEFAULT 0,
    until   bigint NOT NULL DEFAULT 0,
    slot    int NOT NULL,
    kind    smallint NOT NULL,
    id      text COLLATE "C" NOT NULL,
    process text COLLATE "C" NOT NULL DEFAULT '',
    label   text COLLATE "C" NOT NULL DEFAULT '',
    PRIMARY KEY (home, slot)
) WITH (fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 5000);

-- Decides one batch of one process, as specified by Store.Apply of the package semaphore/store. Enter comes as five arrays.
-- If it returns unfinished, everything but Enter is done, because the queue comes before Enter: call it again for that.
-- Errors: TB001: the transaction is not READ COMMITTED; TB002: the counters of the semaphore and its slots disagree.
CREATE FUNCTION semaphore_apply_1(
    a_name text, a_process text, a_label text, a_channel text, a_lease bigint, a_patience bigint, a_alive bigint,
    a_permits bigint, a_limit bigint, a_version bigint, a_set bigint, a_add bigint, a_deadline bigint,
    a_leave text[], a_renew text[],
    a_enter text[], a_wants bigint[], a_tickets bigint[], a_waits boolean[], a_labels text[],
    OUT at bigint, OUT late boolean, OUT fresh boolean, OUT total bigint, OUT earliest bigint, OUT told bigint,
    OUT limited bigint, OUT version bigint, OUT unchanged boolean,
    OUT standings int[], OUT renewed boolean[],
    OUT outcomes int[], OUT fences bigint[], OUT places bigint[], -- of Enter
    OUT unfinished boolean,
    OUT grants text[] -- to this process: 'id outcome fence expires', which is also the text of notifications
) LANGUAGE plpgsql
  SET search_path FROM CURRENT
  -- Plans are cached, so they must suit any number of slots: never worse than one pass over the slots of the semaphore.
  SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_nestloop = off SET jit = off
AS $$
DECLARE
    refused CONSTANT int := 0; queued CONSTANT int := 1; granted CONSTANT int := 2; too_many CONSTANT int := 3;
    second CONSTANT bigint := 1000000;
    chunks CONSTANT int[] := '{100, 10000}'; -- of the queue; each needs a pass over all slots; the first is usually enough
    named semaphore;
    s semaphore_state;
    strays bigint; moved bigint;
    created boolean := false;
    changed boolean := false; -- earliest must be computed again
    lost int; lost_permits bigint;
    mine int; -- the process' slot
    newer boolean := false; -- the limit has changed
    kinds_in smallint[] := '{2, 3}';
    chunk int; w record; alive boolean; silent boolean; blocked boolean; seen int; outcome int; fence bigint; expires bigint; news text;
    taken int[]; numbers bigint[]; freed int[]; stale int[];
    tell_slots int[] := '{}'; tell_channels text[] := '{}'; tell_texts text[] := '{}';
    kinds int[]; slots int[]; firsts int[]; f int; head bigint; wants bigint; place bigint; prolonged int[] := '{}';
    new_kind int := 0; new_kinds int[] := '{}'; new_ids text[] := '{}'; new_permits bigint[] := '{}';
    new_numbers bigint[] := '{}'; new_since bigint[] := '{}'; new_until bigint[] := '{}'; new_labels text[] := '{}'; free int; more int; busy int;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'semaphore_apply_1 must run READ COMMITTED' USING ERRCODE = 'TB001';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN -- a permit whose grant a crash undoes would be granted twice
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    LOOP
        SELECT * INTO named FROM semaphore WHERE name = a_name FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO semaphore (name) VALUES (a_name) ON CONFLICT DO NOTHING;
    END LOOP;
    SELECT * INTO s FROM semaphore_state WHERE home = named.id * 4294967296 + named.era;
    IF NOT FOUND THEN
        created := true;
        INSERT INTO semaphore_state (home) VALUES (named.id * 4294967296 + named.era) RETURNING * INTO s;
    END IF;
    -- The number of row versions without room in their page. Only its difference over this call matters.
    strays := pg_stat_get_xact_tuples_updated('semaphore_state'::regclass)
        - pg_stat_get_xact_tuples_hot_updated('semaphore_state'::regclass)
        + pg_stat_get_xact_tuples_updated('semaphore_slot'::regclass)
        - pg_stat_get_xact_tuples_hot_updated('semaphore_slot'::regclass);
    at := (extract(epoch FROM clock_timestamp()) * second)::bigint;
    fresh := false; total := 0; earliest := 0; told := 0; limited := 0; version := 0; unchanged := false; unfinished := false;
    late := a_deadline <> 0 AND at > a_deadline;
    IF late THEN
        RETURN;
    END IF;

    -- The clock stands still if it is up to two seconds behind the latest batch. If it is further behind, it was set back.
    IF s.seen - at > 2 * second THEN
        UPDATE semaphore_slot
        SET until = until - (s.seen - at), since = CASE kind WHEN 4 THEN since - (s.seen - at) ELSE since END
        WHERE home = s.home AND kind IN (1, 4);
        changed := true;
        s.earliest := s.earliest - (s.seen - at);
    ELSIF at < s.seen THEN
        at := s.seen;
    END IF;

    IF a_version > s.version THEN -- the newest version is in force
        s.permits := a_limit;
        s.version := a_version;
        newer := true;
    END IF;
    IF a_set <> 0 OR a_add <> 0 THEN
        wants := CASE WHEN a_set <> 0 THEN greatest(a_set, 0) WHEN s.permits > 0 THEN s.permits + a_add ELSE a_permits + a_add END;
        unchanged := a_set = 0 AND wants NOT BETWEEN 1 AND 2147483648;
        IF NOT unchanged THEN
            s.permits := wants;
            s.version := s.version + 1;
            newer := true;
        END IF;
    END IF;
    limited := s.permits;
    version := s.version;
    total := CASE WHEN s.permits > 0 THEN s.permits ELSE a_permits END;

    IF s.held > 0 AND s.earliest <= at THEN -- drops expired leases
        WITH gone AS (
            UPDATE semaphore_slot SET kind = -1 WHERE home = s.home AND kind = 1 AND until <= at RETURNING permits)
        SELECT count(*), coalesce(sum(permits), 0) INTO lost, lost_permits FROM gone;
        s.held := s.held - lost;
        s.used := s.used - lost_permits;
        changed := true;
    END IF;

    IF cardinality(a_leave) > 0 THEN
        WITH gone AS (
            UPDATE semaphore_slot e SET kind = -e.kind FROM (SELECT DISTINCT unnest(a_leave) AS id) l
            WHERE e.home = s.home AND e.kind BETWEEN 1 AND 3 AND e.id = l.id
            RETURNING e.id, -e.kind AS kind, e.permits),
        asked AS (
            SELECT id, i, row_number() OVER (PARTITION BY id ORDER BY i) AS nth
            FROM unnest(a_leave) WITH ORDINALITY AS u (id, i))
        SELECT array_agg(CASE WHEN gone.kind IS NULL THEN 0 WHEN gone.kind = 1 THEN 2 ELSE 1 END ORDER BY i),
               s.held - count(*) FILTER (WHERE gone.kind = 1), s.queued - count(*) FILTER (WHERE gone.kind = 2),
               s.idle - count(*) FILTER (WHERE gone.kind = 3),
               s.used - coalesce(sum(permits) FILTER (WHERE gone.kind = 1), 0)
        INTO standings, s.held, s.queued, s.idle, s.used
        FROM asked LEFT JOIN gone ON gone.id = asked.id AND nth = 1;
        changed := true;
    END IF;
    IF least(s.used, s.held, s.queued, s.idle) < 0 OR (s.used = 0) <> (s.held = 0) THEN
        RAISE EXCEPTION 'semaphore % has other holders than it counts', named.id USING ERRCODE = 'TB002';
    END IF;

    IF cardinality(a_renew) > 0 THEN
        WITH found AS (
            UPDATE semaphore_slot e SET until = greatest(until, at + a_lease) FROM (SELECT DISTINCT unnest(a_renew) AS id) r
            WHERE e.home = s.home AND e.kind = 1 AND e.id = r.id
            RETURNING e.id)
        SELECT array_agg(found.id IS NOT NULL ORDER BY i) INTO renewed
        FROM unnest(a_renew) WITH ORDINALITY AS u (id, i) LEFT JOIN found ON found.id = u.id;
        changed := true;
    END IF;

    IF s.processes > 0 THEN
        SELECT slot, number INTO mine, told FROM semaphore_slot WHERE home = s.home AND kind = 4 AND id = a_process;
    END IF;
    fresh := mine IS NULL;
    told := coalesce(told, 0);

    grants := '{}';
    IF newer AND s.queued > 0 THEN -- refuses waiters that can never be admitted
        stale := '{}';
        FOR w IN
            WITH gone AS (
                UPDATE semaphore_slot e SET kind = -2
                WHERE e.home = s.home AND e.kind = 2 AND e.permits > CASE WHEN s.permits > 0 THEN s.permits ELSE e.since END
                RETURNING e.id, e.process, e.number)
            SELECT gone.id, gone.process, p.slot AS whose, p.until AS patience, p.label AS channel
            FROM gone LEFT JOIN semaphore_slot p ON p.home = s.home AND p.kind = 4 AND p.id = gone.process
            ORDER BY gone.number, gone.id
        LOOP
            s.queued := s.queued - 1;
            news := concat_ws(' ', w.id, too_many, 0, 0);
            IF w.process = a_process AND a_patience > 0 THEN
                grants := grants || news;
            ELSIF w.process <> a_process AND w.patience >= at THEN
                tell_slots := tell_slots || w.whose;
                tell_channels := tell_channels || w.channel;
                tell_texts := tell_texts || news;
            ELSIF w.process <> a_process AND w.whose IS NOT NULL THEN
                stale := stale || w.whose;
            END IF;
        END LOOP;
        UPDATE semaphore_slot SET kind = -kind WHERE home = s.home AND slot = ANY (stale);
        GET DIAGNOSTICS lost = ROW_COUNT;
        s.processes := s.processes - lost;
    END IF;

    -- Waiters are admitted in their order, and none is overtaken, so that a request for many permits is not starved. Behind
    -- them, once there are no holders, come those that wait for that, also behind a waiter whose process is silent.
    FOR pass IN 1 .. 3 LOOP
        EXIT WHEN pass = 3 AND 2 = ANY (kinds_in);
        chunk := chunks[least(pass, 2)];
        unfinished := s.queued > 0 AND 2 = ANY (kinds_in) OR s.idle > 0 AND s.used = 0;
        EXIT WHEN NOT unfinished;
        taken := '{}'; numbers := '{}'; freed := '{}'; stale := '{}';
        seen := 0;
        blocked := false;
        FOR w IN
            SELECT e.*, p.slot AS whose, p.until AS patience, p.since AS awake, p.label AS channel
            FROM (SELECT slot, kind, id, process, permits, number, since AS own, until AS lasts FROM semaphore_slot
                  WHERE home = s.home AND kind = ANY (kinds_in) ORDER BY kind, number, id LIMIT chunk) e
            LEFT JOIN semaphore_slot p ON p.home = s.home AND p.kind = 4 AND p.id = e.process
            ORDER BY e.kind, e.number, e.id
        LOOP
            alive := CASE WHEN w.process = a_process THEN a_patience > 0 ELSE coalesce(w.patience >= at, false) END;
            silent := w.kind = 2 AND alive AND w.process <> a_process AND w.awake < at;
            blocked := CASE WHEN w.kind = 3 OR silent THEN s.used > 0
                            ELSE alive AND s.used + w.permits > CASE WHEN s.permits > 0 THEN s.permits ELSE w.own END END;
            EXIT WHEN blocked;
            IF silent THEN
                kinds_in := '{3}';
                EXIT;
            END IF;
            seen := seen + 1;
            outcome := granted;
            fence := 0;
            expires := 0;
            IF w.kind = 3 THEN
                s.idle := s.idle - 1;
                freed := freed || w.slot;
            ELSE
                s.queued := s.queued - 1;
                IF alive THEN
                    s.fence := greatest(s.fence + 1, at);
                    s.used := s.used + w.permits;
                    s.held := s.held + 1;
                    taken := taken || w.slot;
                    numbers := numbers || s.fence;
                    fence := s.fence;
                    expires := at + w.lasts;
                    changed := true;
                ELSE
                    freed := freed || w.slot;
                END IF;
            END IF;
            IF alive THEN
                news := concat_ws(' ', w.id, outcome, fence, expires);
                IF w.process = a_process THEN
                    grants := grants || news;
                ELSE
                    tell_slots := tell_slots || w.whose;
                    tell_channels := tell_channels || w.channel;
                    tell_texts := tell_texts || news;
                END IF;
            ELSIF w.process <> a_process AND w.whose IS NOT NULL THEN
                stale := stale || w.whose;
            END IF;
        END LOOP;
        IF cardinality(taken) > 0 THEN
            UPDATE semaphore_slot e SET kind = 1, number = u.number, since = at, until = at + e.until
            FROM unnest(taken, numbers) AS u (slot, number)
            WHERE e.home = s.home AND e.slot = ANY (taken) AND e.slot = u.slot;
        END IF;
        IF cardinality(freed) + cardinality(stale) > 0 THEN
            UPDATE semaphore_slot SET kind = -kind WHERE home = s.home AND slot = ANY (freed || stale);
            GET DIAGNOSTICS lost = ROW_COUNT;
            s.processes := s.processes - (lost - cardinality(freed)); -- stale has duplicates
        END IF;
        unfinished := NOT blocked AND CASE WHEN silent THEN s.idle > 0 ELSE seen = chunk END;
        EXIT WHEN NOT unfinished;
    END LOOP;
    IF cardinality(tell_slots) > 0 THEN
        UPDATE semaphore_slot SET number = number + cardinality(array_positions(tell_slots, slot))
        WHERE home = s.home AND slot = ANY (tell_slots);
        PERFORM pg_notify(u.channel, u.payload) FROM unnest(tell_channels, tell_texts) AS u (channel, payload);
    END IF;

    IF cardinality(a_enter) > 0 AND NOT unfinished THEN
        SELECT array_agg(e.kind::int ORDER BY i), array_agg(e.number ORDER BY i), array_agg(e.slot ORDER BY i),
               array_agg(first::int ORDER BY i)
        INTO kinds, numbers, slots, firsts
        FROM (SELECT id, i, min(i) OVER (PARTITION BY id) AS first FROM unnest(a_enter) WITH ORDINALITY AS u (id, i)) a
        LEFT JOIN semaphore_slot e ON e.home = s.home AND e.kind BETWEEN 1 AND 3 AND e.id = a.id;
        IF s.queued > 0 THEN
            SELECT min(number) INTO head FROM semaphore_slot WHERE home = s.home AND kind = 2;
        END IF;
        outcomes := '{}'; fences := '{}'; places := '{}';
        FOR i IN 1 .. cardinality(a_enter) LOOP
            f := firsts[i]; -- the first index of the same id, which has its state
            wants := a_wants[i];
            outcome := refused;
            fence := 0;
            place := 0;
            IF wants > 0 AND kinds[f] = 1 THEN -- granted before, and the reply was lost
                outcome := granted;
                fence := numbers[f];
                IF slots[f] IS NOT NULL THEN
                    prolonged := prolonged || slots[f];
                END IF;
            ELSIF wants = 0 THEN
                outcome := CASE WHEN s.used = 0 THEN granted ELSE queued END;
                IF s.used > 0 AND kinds[f] IS NULL THEN
                    s.idle := s.idle + 1;
                    new_kind := 3;
                END IF;
            ELSIF wants > total THEN
                outcome := too_many;
            ELSIF kinds[f] = 2 THEN
                outcome := queued;
                place := numbers[f];
            ELSIF s.used + wants <= total AND (s.queued = 0 OR a_tickets[i] > 0 AND a_tickets[i] < head) THEN
                outcome := granted;
                s.fence := greatest(s.fence + 1, at);
                s.used := s.used + wants;
                s.held := s.held + 1;
                fence := s.fence;
                new_kind := 1;
            ELSIF a_waits[i] THEN
                outcome := queued;
                place := CASE WHEN a_tickets[i] > 0 THEN a_tickets[i] ELSE greatest(s.ticket + 1, at) END;
                s.ticket := greatest(s.ticket, place);
                s.queued := s.queued + 1;
                head := least(head, place);
                new_kind := 2;
            END IF;
            IF new_kind > 0 THEN
                kinds[f] := new_kind;
                numbers[f] := fence + place; -- one of them is 0
                new_kinds := new_kinds || new_kind;
                new_ids := new_ids || a_enter[i];
                new_permits := new_permits || wants;
                new_numbers := new_numbers || numbers[f];
                new_since := new_since || CASE new_kind WHEN 1 THEN at WHEN 2 THEN a_permits ELSE 0 END;
                new_until := new_until || CASE new_kind WHEN 1 THEN at + a_lease WHEN 2 THEN a_lease ELSE 0 END;
                new_labels := new_labels || CASE a_labels[i] WHEN '' THEN a_label ELSE a_labels[i] END;
                new_kind := 0;
            END IF;
            outcomes := outcomes || outcome;
            fences := fences || fence;
            places := places || place;
        END LOOP;
        IF cardinality(prolonged) > 0 THEN
            changed := true;
            UPDATE semaphore_slot SET until = greatest(until, at + a_lease)
            WHERE home = s.home AND slot = ANY (prolonged);
        END IF;
    END IF;

    -- The process, as one with waiters.
    IF a_patience > 0 AND fresh THEN
        IF s.processes > 0 THEN -- drops those that have died
            WITH gone AS (
                UPDATE semaphore_slot SET kind = -kind WHERE home = s.home AND kind = 4 AND until < at - 3600 * second
                RETURNING kind)
            SELECT s.processes - count(*) INTO s.processes FROM gone;
        END IF;
        new_kinds := new_kinds || 4;
        new_ids := new_ids || a_process;
        new_permits := new_permits || 0::bigint;
        new_numbers := new_numbers || 0::bigint;
        new_since := new_since || (at + a_alive);
        new_until := new_until || (at + a_patience);
        new_labels := new_labels || a_channel;
        s.processes := s.processes + 1;
    ELSIF a_patience > 0 THEN
        UPDATE semaphore_slot SET until = at + a_patience, since = at + a_alive WHERE home = s.home AND slot = mine;
    ELSIF NOT fresh THEN
        UPDATE semaphore_slot SET kind = -kind WHERE home = s.home AND slot = mine;
        s.processes := s.processes - 1;
    END IF;

    -- New rows take free slots, the lowest first, so that the highest stay free and can be removed.
    IF cardinality(new_ids) > 0 THEN
        changed := true;
        free := s.slots + cardinality(new_ids) - s.held - s.queued - s.idle - s.processes;
        slots := '{}';
        IF free > 0 THEN
            SELECT array_agg(slot) INTO slots FROM (
                SELECT slot FROM semaphore_slot WHERE home = s.home AND kind <= 0
                ORDER BY slot LIMIT cardinality(new_ids)) e;
            UPDATE semaphore_slot e
            SET kind = new_kinds[i], id = new_ids[i], permits = new_permits[i], number = new_numbers[i],
                since = new_since[i], until = new_until[i], process = a_process, label = new_labels[i]
            FROM unnest(slots) WITH ORDINALITY AS u (slot, i)
            WHERE e.home = s.home AND e.slot = u.slot;
        END IF;
        IF coalesce(cardinality(slots), 0) <> least(free, cardinality(new_ids)) THEN
            RAISE EXCEPTION 'semaphore % has not the free slots that it counts', named.id USING ERRCODE = 'TB002';
        END IF;
        more := cardinality(new_ids) - cardinality(slots);
        INSERT INTO semaphore_slot (home, slot, kind, id, permits, number, since, until, process, label)
        SELECT s.home, s.slots + i, new_kinds[j], new_ids[j], new_permits[j], new_numbers[j],
               new_since[j], new_until[j], a_process, new_labels[j]
        FROM generate_series(1, more) i, LATERAL (SELECT i + cardinality(slots)) AS u (j);
        s.slots := s.slots + more;
    END IF;

    IF changed THEN
        SELECT coalesce(min(until), 0) INTO s.earliest FROM semaphore_slot WHERE home = s.home AND kind = 1;
    END IF;
    earliest := s.earliest;

    busy := s.held + s.queued + s.idle + s.processes;
    IF s.slots > 256 AND s.slots > 4 * busy THEN -- after a peak: moves the used slots to the front
        more := greatest(2 * busy, 128, s.slots - 20000); -- the next batch continues if there are very many
        UPDATE semaphore_slot e
        SET kind = m.kind, id = m.id, permits = m.permits, number = m.number, since = m.since, until = m.until,
            process = m.process, label = m.label
        FROM (SELECT *, row_number() OVER (ORDER BY slot) AS i FROM semaphore_slot
              WHERE home = s.home AND slot > more AND kind > 0) m
        JOIN (SELECT slot, row_number() OVER (ORDER BY slot) AS i FROM semaphore_slot
              WHERE home = s.home AND slot <= more AND kind <= 0) f ON f.i = m.i
        WHERE e.home = s.home AND e.slot = f.slot;
        DELETE FROM semaphore_slot WHERE home = s.home AND slot > more;
        s.slots := more;
    END IF;

    UPDATE semaphore_state SET fence = s.fence, ticket = s.ticket, seen = at, permits = s.permits, version = s.version, used = s.used,
        earliest = s.earliest, slots = s.slots, held = s.held, queued = s.queued, idle = s.idle, processes = s.processes
    WHERE home = s.home;

    more := s.strayed - strays + pg_stat_get_xact_tuples_updated('semaphore_state'::regclass)
        - pg_stat_get_xact_tuples_hot_updated('semaphore_state'::regclass)
        + pg_stat_get_xact_tuples_updated('semaphore_slot'::regclass)
        - pg_stat_get_xact_tuples_hot_updated('semaphore_slot'::regclass);
    IF more > 8 + s.slots / 4 THEN
        named.era := named.era + 1;
        moved := named.id * 4294967296 + named.era;
        UPDATE semaphore SET era = named.era WHERE id = named.id;
        UPDATE semaphore_slot e SET home = moved WHERE e.home = s.home;
        UPDATE semaphore_state e SET home = moved, strayed = 0 WHERE e.home = s.home;
    ELSIF more > s.strayed THEN
        UPDATE semaphore_state e SET strayed = more WHERE e.home = s.home;
    END IF;

    IF created OR random() < 0.01 THEN
        PERFORM semaphore_sweep_1(at);
    END IF;
END $$;

-- Removes some of the semaphores that were not used for a day. Each new semaphore calls it, and one batch in a hundred, so
-- that there are never many.
CREATE FUNCTION semaphore_sweep_1(at bigint) RETURNS void LANGUAGE plpgsql
  SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    start bigint;
    unused bigint[];
    homes bigint[];
BEGIN
    SELECT floor(random() * (max(id) + 20)) - 20 INTO start FROM semaphore; -- so that the first are chosen as often as others
    SELECT array_agg(id) INTO unused FROM (
        SELECT id FROM (SELECT id FROM semaphore WHERE id > start ORDER BY id LIMIT 20) c
        JOIN semaphore s USING (id)
        WHERE NOT EXISTS (SELECT FROM semaphore_state t WHERE t.home = s.id * 4294967296 + s.era AND t.seen >= at - 86400000000)
        FOR UPDATE OF s SKIP LOCKED) u;
    IF unused IS NULL THEN
        RETURN;
    END IF;
    -- Their state is certain only now that they are locked.
    SELECT array_agg(s.id), array_agg(t.home) INTO unused, homes
    FROM semaphore s JOIN semaphore_state t ON t.home = s.id * 4294967296 + s.era
    WHERE s.id = ANY (unused) AND t.seen < at - 86400000000
      AND NOT EXISTS (SELECT FROM semaphore_slot e WHERE e.home = t.home AND e.kind > 0 AND e.until > at);
    DELETE FROM semaphore_slot WHERE home = ANY (homes);
    DELETE FROM semaphore_state WHERE home = ANY (homes);
    DELETE FROM semaphore WHERE id = ANY (unused);
END $$;

-- Returns the holders of permits, the longest-holding first.
CREATE FUNCTION semaphore_holders_1(a_name text)
  RETURNS TABLE (id text, permits bigint, fence bigint, since bigint, expires bigint, label text) LANGUAGE sql STABLE
  SET search_path FROM CURRENT
AS $$
    SELECT e.id, e.permits, e.number, e.since, e.until, e.label
    FROM semaphore s
    JOIN semaphore_state t ON t.home = s.id * 4294967296 + s.era
    JOIN semaphore_slot e ON e.home = t.home AND e.kind = 1
    WHERE s.name = a_name
      AND e.until > greatest((extract(epoch FROM clock_timestamp()) * 1000000)::bigint, t.seen - 2000000)
    ORDER BY e.number;
$$;

-- Returns the use of a semaphore; no row if it does not exist.
CREATE FUNCTION semaphore_stats_1(a_name text)
  RETURNS TABLE (permits bigint, version bigint, used bigint, waiting bigint) LANGUAGE sql STABLE
  SET search_path FROM CURRENT
AS $$
    SELECT t.permits, t.version, (SELECT coalesce(sum(e.permits), 0)::bigint FROM semaphore_slot e
            WHERE e.home = t.home AND e.kind = 1
              AND e.until > greatest((extract(epoch FROM clock_timestamp()) * 1000000)::bigint, t.seen - 2000000)), t.queued::bigint
    FROM semaphore s
    JOIN semaphore_state t ON t.home = s.id * 4294967296 + s.era
    WHERE s.name = a_name;
$$;
