-- PostgreSQL 14 or later. Switches of limiting for a whole fleet; a missing row means on.
CREATE TABLE IF NOT EXISTS "t_ratelimite_switch" (
  "name" varchar(64) NOT NULL,
  "enabled" smallint DEFAULT 1 NOT NULL,
  "changedat" timestamptz DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY ("name")
);

-- What ON UPDATE CURRENT_TIMESTAMP is elsewhere.
CREATE OR REPLACE FUNCTION "t_ratelimite_switch_modified"() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW."changedat" := clock_timestamp();
  RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER "t_ratelimite_switch_modified" BEFORE UPDATE ON "t_ratelimite_switch" FOR EACH ROW
WHEN (OLD."enabled" IS DISTINCT FROM NEW."enabled")
EXECUTE FUNCTION "t_ratelimite_switch_modified"();
