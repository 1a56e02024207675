-- PostgreSQL 14 or later. Who changed what, when and why: a row is written with the change, or neither.
-- oftable and name say which row; fromrow and torow are all of its columns before and after, as JSON of texts; NULL: there
-- was none, there is none. undoneby is the auditid of the change that undid this one. Of a penalty or a reset fromrow is NULL,
-- and torow is a JSON text that says what was done.
CREATE TABLE IF NOT EXISTS "t_ratelimite_audit" (
  "auditid" bigint GENERATED ALWAYS AS IDENTITY,
  "changedat" timestamptz NOT NULL DEFAULT clock_timestamp(),
  "changedby" varchar(256) NOT NULL,
  "why" varchar(2000) NOT NULL,
  "oftable" varchar(127) NOT NULL,
  "name" varchar(512) NOT NULL,
  "fromrow" text NULL,
  "torow" text NULL,
  "undoneby" bigint NULL,
  PRIMARY KEY ("auditid")
);
